"""What test_counter_kernel.py runs, each in a process of its own: `-m tests.cuda.counting NAME`."""

import re
import struct
import sys

import pytest

from pdnode.engine.counter_kernel import KernelCounter, architecture_of, compile_kernel
from pdnode.engine.protocol import COUNTER_OFFSET, COUNTER_PAGE_BYTES, SILENT_OFFSET
from pdnode.memory.cudriver import CudaError
from pdnode.memory.cumem import CumemRegion
from pdnode.memory.region import MemfdRegion
from tests.support.cuda_stub import Stub

GPU = 1


def counts() -> None:
    """Raised through cuda-python's own packing of the arguments; seen through the page's memfd."""
    stub = Stub()
    page = MemfdRegion.create("counter", COUNTER_PAGE_BYTES)
    memory = CumemRegion.create(GPU, 4096)
    counter = KernelCounter(
        page, GPU, count_address=memory.address + 8, stream=lambda: 0, code=b"\x7fELF"
    )
    seen = MemfdRegion.adopt(page.fd, COUNTER_PAGE_BYTES).map()
    assert struct.unpack_from("<I", seen, SILENT_OFFSET) == (1,)
    for raised in range(1, 4):
        counter.raise_layer()
        assert struct.unpack_from("<Q", seen, COUNTER_OFFSET) == (raised,)
    assert struct.unpack_from("<3Q", memory.map()) == (0, 3, 0)
    assert stub.violations() == []


def names_the_architecture() -> None:
    assert architecture_of(GPU) == "sm_90"


def compiles() -> None:
    """The sum is kept, then comes the fence of the whole system, then the store to `shown`."""
    text = compile_kernel("compute_80").decode()
    lines = [line.strip() for line in text.splitlines()]
    (add,) = (n for n, line in enumerate(lines) if line.startswith("add.s64"))
    fences = [n for n, line in enumerate(lines) if re.match(r"(membar|fence)\b.*\bsys\b", line)]
    stores = [n for n, line in enumerate(lines) if re.match(r"st\.(volatile\.)?global", line)]
    count, shown = stores
    assert add < count < fences[0] <= fences[-1] < shown, text
    assert "volatile" in lines[shown], text
    for architecture in ("sm_80", "sm_90", "sm_100"):
        assert compile_kernel(architecture)[:4] == b"\x7fELF"


def says_what_cannot_be_compiled() -> None:
    with pytest.raises(
        CudaError, match=r"^nvrtcCompileProgram: NVRTC_ERROR_INVALID_OPTION: .*-arch"
    ):
        compile_kernel("sm_7")


def lacks_nvrtc() -> None:
    with pytest.raises(CudaError, match=r"^NVRTC cannot be loaded: "):
        compile_kernel("sm_90")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
