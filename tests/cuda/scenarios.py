"""What test_cumem.py runs, each in a process on the stub: `-m tests.cuda.scenarios NAME`.

A scenario asserts by itself; at its end nothing may be left and nothing may have been violated.
"""

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from pdnode.core.geometry import KvGeometry
from pdnode.memory import cudriver
from pdnode.memory.cudriver import CudaError
from pdnode.memory.cumem import CumemRegion
from pdnode.memory.handover import receive_frame, send_frame
from pdnode.memory.region import MemfdRegion
from pdnode.memory.staged import StagedRegion, Staging
from tests.support.cuda_stub import Stub

GPU = 1
SIZE = 3 << 20  # no multiple of the granularity
FORM = KvGeometry(
    kind="gqa", layers=3, kv_heads=2, head_dim=8, page_tokens=16, dtype="float32", tp=1, pages=20
)


class Buffer:
    """Pinned host memory for copies to and from a GPU, whose context becomes current."""

    def __init__(self, size: int = SIZE) -> None:
        self.map = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_uint8.from_buffer(self.map))
        cudriver.use(GPU)
        cudriver.register_host(self.address, size)

    def read(self, region: CumemRegion, size: int, at: int = 0) -> bytes:
        device = region.address + at
        cudriver.copy_to_host(host=self.address, device=device, size_bytes=size, stream=0)
        cudriver.synchronize(0)
        return self.map[:size]

    def write(self, region: CumemRegion, data: bytes, at: int = 0) -> None:
        self.map[: len(data)] = data
        device = region.address + at
        cudriver.copy_to_device(device=device, host=self.address, size_bytes=len(data), stream=0)
        cudriver.synchronize(0)

    def close(self) -> None:
        cudriver.unregister_host(self.address)
        cudriver.let_go(GPU)


def give(sock: socket.socket, region: CumemRegion) -> None:
    send_frame(sock, b"region", [region.fd], max_bytes=64)


def take(sock: socket.socket) -> CumemRegion:
    received = receive_frame(sock, max_bytes=64)
    assert received is not None
    return CumemRegion.adopt(received.fds[0], SIZE, GPU)


def start(name: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Another process, with a socket to it as its standard input."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.cuda.scenarios", name]
        return subprocess.Popen(command, stdin=theirs), ours


def holds_bytes() -> None:
    """All that a region does in one process: what the plants are looked for with."""
    region = CumemRegion.create(GPU, SIZE)
    buffer = Buffer()
    buffer.write(region, b"x" * SIZE)
    assert buffer.read(region, SIZE) == b"x" * SIZE
    buffer.close()
    region.close()


def worker() -> None:
    """The other process of `shares_bytes` and `outlives_its_worker`."""
    with socket.socket(fileno=0) as sock:
        region = CumemRegion.create(GPU, SIZE)
        buffer = Buffer()
        buffer.write(region, b"w" * SIZE)
        give(sock, region)
        assert sock.recv(1) == b"d"
        assert buffer.read(region, SIZE) == b"w" * (SIZE - 4096) + b"d" * 4096
        region.map()[:3] = b"cpu"
        assert buffer.read(region, 4) == b"cpuw"
        buffer.close()
        region.close()


def shares_bytes() -> None:
    process, sock = start("worker")
    region = take(sock)
    buffer = Buffer()
    assert buffer.read(region, SIZE) == b"w" * SIZE
    buffer.write(region, b"d" * 4096, SIZE - 4096)
    sock.send(b"d")
    assert process.wait(30) == 0
    sock.close()
    assert buffer.read(region, 4) == b"cpuw"
    buffer.close()
    region.close()
    region.close()


def outlives_its_worker() -> None:
    before = os.listdir("/proc/self/fd")
    process, sock = start("worker")
    region = take(sock)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    sock.close()
    buffer = Buffer()
    assert buffer.read(region, SIZE) == b"w" * SIZE
    buffer.close()
    dmabuf = region.dmabuf()
    os.close(dmabuf)
    region.close()
    assert os.listdir("/proc/self/fd") == before


def refuses_what_is_no_region() -> None:
    region = CumemRegion.create(GPU, SIZE)
    host = MemfdRegion.create("host", SIZE)
    for fd, size, text in (
        (host.fd, SIZE, "cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE"),
        (region.fd, SIZE + (2 << 20), "cuMemMap: CUDA_ERROR_INVALID_VALUE"),
    ):
        with pytest.raises(CudaError, match=f"^{text}$"):
            CumemRegion.adopt(fd, size, GPU)
        os.fstat(fd)  # still the caller's
    region.close()
    assert stub.violations() == [f"cuMemMap: {6 << 20} bytes of memory of {4 << 20}"]
    raise SystemExit(0 if not stub.live() else 1)


def says_when_the_gpu_is_full() -> None:
    """Run with STUB_CUDA_MEMORY of 4 MiB."""
    region = CumemRegion.create(GPU, SIZE)
    text = r"^cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY for 4194304 bytes of GPU 0000:1b:00.0$"
    for _ in range(2):
        with pytest.raises(CudaError, match=text):
            CumemRegion.create(GPU, SIZE)
    region.close()
    CumemRegion.create(GPU, SIZE).close()


def the_cpu_stays_out() -> None:
    """Run with STUB_CUDA_HOST_ACCESS of 0."""
    region = CumemRegion.create(GPU, SIZE)
    text = r"GPU 0000:1b:00.0 \(cuMemSetAccess: CUDA_ERROR_NOT_SUPPORTED\)$"
    with pytest.raises(CudaError, match=text):
        region.map()
    region.close()


def is_an_array() -> None:
    """What torch is shown of the memory; numpy reads the same form under another name."""
    region = CumemRegion.create(GPU, SIZE)
    bytes_of_it = region.map()

    class Host:
        __array_interface__ = region.__cuda_array_interface__

    array = np.asarray(Host())
    assert (array.shape, array.dtype, array.flags.writeable) == ((SIZE,), np.uint8, True)
    array[-1] = 7
    assert bytes_of_it[SIZE - 1] == 7
    assert array.ctypes.data == region.address
    del bytes_of_it
    region.close()


def finds_gpus_by_any_name() -> None:
    second = cudriver.gpu(1)
    for name in ("1", "0000:1b:00.0", "00000000:1B:00.0", "0000:1b:00", second.uuid):
        assert cudriver.find_gpu(name) == second, name
    assert cudriver.find_gpu("0").pci == "0000:1a:00.0"
    text = r"^no GPU 0000:1c:00.0 is visible here; there are: 0000:1a:00.0 \(GPU-"
    with pytest.raises(CudaError, match=text):
        cudriver.find_gpu("0000:1c:00.0")


def stages_pages() -> None:
    """Of all pages only those asked for are copied, each in the layer that is done."""
    region = StagedRegion.create("kv", GPU, FORM.region_bytes)
    mirror = MemfdRegion.adopt(os.dup(region.fd), FORM.region_bytes)
    gpu, host = region.map(), mirror.map()
    gpu[:] = b"g" * FORM.region_bytes
    host[:] = b"h" * FORM.region_bytes
    staging = Staging(region, FORM, lambda: 0, waits=True)

    def pages(view: memoryview, what: bytes) -> set[tuple[int, int]]:
        places = ((layer, page) for layer in range(FORM.layers) for page in range(FORM.pages))
        size = FORM.page_bytes
        return {
            (layer, page)
            for layer, page in places
            if view[(at := layer * FORM.layer_stride + page * size) : at + size] == what * size
        }

    staging.begin(fetch=[7, 3, 4], store=[9, 10, 0])
    assert pages(gpu, b"h") == {(layer, page) for layer in range(3) for page in (3, 4, 7)}
    assert pages(host, b"g") == set()
    staging.layer_written(1)
    assert pages(host, b"g") == {(1, 9), (1, 10), (1, 0)}
    staging.begin(fetch=[], store=[])
    staging.layer_written(2)
    assert pages(host, b"g") == {(1, 9), (1, 10), (1, 0)}
    assert stub.copied_bytes() == (3 * FORM.layers + 3) * FORM.page_bytes
    del gpu, host
    mirror.close()
    region.close()
    region.close()


def frees_twice() -> None:
    """The stub finds what a driver would not forgive."""
    handle = cudriver.create(GPU, 2 << 20)
    cudriver.release(handle)
    with pytest.raises(CudaError, match=r"^cuMemRelease: CUDA_ERROR_INVALID_VALUE$"):
        cudriver.release(handle)
    assert stub.violations() == [f"cuMemRelease: {handle} is no handle (any more)"]
    raise SystemExit(0)


if __name__ == "__main__":
    stub = Stub()
    globals()[sys.argv[1]]()
    assert stub.violations() == []
    assert stub.live() == {}
