"""Regions in device memory on the stub of the driver, by the real cuda-python."""

import subprocess
from pathlib import Path

import pytest

from tests.support.cuda_stub import environment, run_python

pytestmark = pytest.mark.timeout(400)  # the first test may fetch cuda-python


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [
        ("holds_bytes", {}),
        ("shares_bytes", {}),
        ("outlives_its_worker", {}),
        ("refuses_what_is_no_region", {}),
        ("says_when_the_gpu_is_full", {"STUB_CUDA_MEMORY": str(4 << 20)}),
        ("the_cpu_stays_out", {"STUB_CUDA_HOST_ACCESS": "0"}),
        ("is_an_array", {}),
        ("finds_gpus_by_any_name", {}),
        ("stages_pages", {}),
        ("frees_twice", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_scenario(scenario: str, settings: dict[str, str]) -> None:
    done = run_python("-m", "tests.cuda.scenarios", scenario, variables=environment(**settings))
    assert done.returncode == 0, done.stdout + done.stderr


_PLANTED = """
import sys, types
import pdnode.memory.{module} as module
path, old, new = module.__file__, sys.argv.pop(1), sys.argv.pop(1)
text = open(path).read()
assert text.count(old) == 1, old
exec(compile(text.replace(old, new), path, "exec"), module.__dict__)
import runpy
sys.argv = ["scenarios", "holds_bytes"]
runpy.run_module("tests.cuda.scenarios", run_name="__main__", alter_sys=True)
"""


def run_planted(module: str, old: str, new: str) -> subprocess.CompletedProcess[str]:
    program = _PLANTED.format(module=module)
    return run_python("-c", program, old, new, variables=environment())


def test_the_stub_finds_a_size_that_is_not_rounded() -> None:
    done = run_planted("cumem", "return -(-size_bytes // unit) * unit", "return size_bytes")
    assert done.returncode != 0
    assert "cuMemCreate: CUDA_ERROR_INVALID_VALUE" in done.stderr


def test_the_stub_finds_memory_without_access() -> None:
    line = "            cudriver.give_access(self.address, self.mapped_bytes, ordinal)\n"
    done = run_planted("cumem", line, "")
    assert done.returncode != 0
    assert "cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE" in done.stderr


@pytest.mark.parametrize("line", ["unmap_memory", "unreserve", "release"])
def test_the_stub_finds_what_is_left(line: str) -> None:
    done = run_planted("cumem", f"undo.callback(cudriver.{line},", "print(")
    assert done.returncode != 0
    assert "AssertionError" in done.stderr or "cuMemAddressFree: CUDA_ERROR" in done.stderr


def test_a_missing_package_is_named() -> None:
    done = run_python("-c", _ASKS, variables={"PYTHONPATH": ""})
    assert done.stdout.startswith("cuda-python cannot be imported"), done.stderr


def test_a_missing_driver_is_named(tmp_path: Path) -> None:
    variables = environment() | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = run_python("-c", _ASKS, variables=variables)
    assert done.stdout.startswith("the CUDA driver cannot be loaded: "), done.stderr


def test_a_driver_without_a_gpu_is_named() -> None:
    done = run_python("-c", _ASKS, variables=environment(STUB_CUDA_DEVICES="0"))
    assert done.stdout == "cuInit: CUDA_ERROR_NO_DEVICE\n", done.stderr


_ASKS = """
from pdnode.memory.cudriver import CudaError, gpu_count
try:
    gpu_count()
except CudaError as error:
    print(error)
"""


def test_importing_pdnode_needs_no_cuda() -> None:
    program = "import sys, pdnode.memory.staged, pdnode.daemon.node; print('cuda' in sys.modules)"
    done = run_python("-c", program, variables={})
    assert done.stdout == "False\n", done.stderr
