"""The layer counter's kernel: launched on the stub of the driver, compiled by the real NVRTC."""

import pytest

from tests.support.cuda_stub import bindings, environment, fetched, run_python

NVRTC = "nvidia-cuda-nvrtc-cu12==12.9.86"  # 90 MB; needs no GPU

pytestmark = pytest.mark.timeout(700)  # the first test may fetch packages


@pytest.mark.parametrize("scenario", ["counts", "names_the_architecture", "lacks_nvrtc"])
def test_on_the_stub(scenario: str) -> None:
    done = run_python("-m", "tests.cuda.counting", scenario, variables=environment())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("scenario", ["compiles", "says_what_cannot_be_compiled"])
def test_by_the_compiler(scenario: str) -> None:
    # Without the stub: NVRTC asks a driver that it finds for what the stub does not have.
    library = fetched(NVRTC) / "nvidia/cuda_nvrtc/lib"
    found = {"PYTHONPATH": str(bindings()), "LD_LIBRARY_PATH": str(library)}
    done = run_python("-m", "tests.cuda.counting", scenario, variables=found)
    assert done.returncode == 0, done.stdout + done.stderr
