"""What `[kv] region = "auto"` takes, by device, provider, libfabric and driver."""

from pathlib import Path

import pytest

from tests.fabric.native_build import BUILD_S, build_fake
from tests.support.cuda_stub import environment, run_python

pytestmark = pytest.mark.timeout(400 + BUILD_S)


@pytest.fixture(scope="module")
def fake() -> Path:
    return build_fake()


@pytest.mark.parametrize(
    ("arguments", "settings", "expected"),
    [
        ("auto cpu verbs decode", {}, "memfd: the engine runs on the CPU"),
        ("auto cuda verbs decode", {}, "cumem: the NICs reach the GPU's memory"),
        ("auto cuda tcp colocated", {}, "cumem: the pages stay on the GPU"),
        ("staged cuda verbs decode", {}, "staged: as configured"),
        (
            "auto cuda tcp prefill", {},
            "staged: provider tcp does not reach the memory of a GPU",
        ),
        (
            "auto cuda verbs prefill", {"FAKE_FABRIC_MINOR": "18"},
            "staged: device_memory: {fake} is libfabric 1.18; 1.20 or newer is needed (dma-buf)",
        ),
        (
            "auto cuda verbs prefill", {"STUB_CUDA_DMA_BUF": "0"},
            "staged: the driver exports no dma-buf of GPU 0000:1a:00.0",
        ),
        (
            "auto cuda verbs prefill", {"STUB_CUDA_DEVICES": "0"},
            "staged: cuInit: CUDA_ERROR_NO_DEVICE",
        ),
        (
            "auto cuda verbs decode verify", {},
            "peer.verify: pages in a GPU's memory cannot be read here; "
            'kv.region = "staged" can',
        ),
    ],
)  # fmt: skip
def test_auto(fake: Path, arguments: str, settings: dict[str, str], expected: str) -> None:
    region, device, provider, role, *rest = arguments.split()
    variables = environment() | {"FAKE_FABRIC": "verbs"} | settings
    command = ["-m", "tests.cuda.choices", region, device, provider, role, str(fake), *rest]
    done = run_python(*command, variables=variables)
    assert done.stdout.strip() == expected.format(fake=fake), done.stderr
