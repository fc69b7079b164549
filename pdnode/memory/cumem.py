"""Memory of one GPU that two processes share through a descriptor: the twin of MemfdRegion.

The worker creates a region, the daemon takes it over and maps it for the same GPU, where the
transfer core registers it. Content and mapping are the GPU's: the CPU asks for its way in by `map`,
and most GPUs refuse.
"""

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any, Self

from pdnode.memory import cudriver
from pdnode.memory.cudriver import CudaError


class CumemRegion:
    """Mapped for its GPU from birth to `close`, which frees what this process holds of it."""

    def __init__(self, ordinal: int, size_bytes: int, handle: int, fd: int | None) -> None:
        """Takes over `handle`, and where it succeeds `fd`; None: exports one."""
        self.ordinal = ordinal  # of the GPU, in this process
        self._size_bytes = size_bytes
        self._view: memoryview | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(cudriver.release, handle)
            self.memory_page_bytes = cudriver.granularity(ordinal)
            self.mapped_bytes = _rounded(size_bytes, self.memory_page_bytes)
            self.address = cudriver.reserve(self.mapped_bytes)
            undo.callback(cudriver.unreserve, self.address, self.mapped_bytes)
            cudriver.map_memory(self.address, self.mapped_bytes, handle)
            undo.callback(cudriver.unmap_memory, self.address, self.mapped_bytes)
            cudriver.give_access(self.address, self.mapped_bytes, ordinal)
            self._fd = cudriver.export_fd(handle) if fd is None else fd
            undo.callback(os.close, self._fd)
            self._undo = undo.pop_all()

    @classmethod
    def create(cls, ordinal: int, size_bytes: int) -> Self:
        """New memory of this GPU; what it holds is undefined. CudaError where there is too little.

        It is taken in whole units of the driver's granularity: up to 2 MiB more than asked for.
        """
        assert size_bytes > 0, size_bytes
        whole = _rounded(size_bytes, cudriver.granularity(ordinal))
        return cls(ordinal, size_bytes, cudriver.create(ordinal, whole), None)

    @classmethod
    def adopt(cls, fd: int, size_bytes: int, ordinal: int) -> Self:
        """Take over a descriptor from another process. CudaError, and `fd` stays the caller's, if
        it is no memory of a GPU or of another size."""
        return cls(ordinal, size_bytes, cudriver.import_fd(fd), fd)

    @property
    def fd(self) -> int:
        assert self._fd >= 0, "region is closed"
        return self._fd

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def map(self) -> memoryview:
        """The bytes for the CPU. CudaError where it cannot reach this GPU's memory."""
        assert self._fd >= 0, "region is closed"
        if self._view is None:
            try:
                cudriver.give_access(self.address, self.mapped_bytes, None)
            except CudaError as error:
                pci = cudriver.gpu(self.ordinal).pci
                text = f"the CPU does not reach the memory of GPU {pci} ({error})"
                raise CudaError(text, error.result) from error
            array = (ctypes.c_uint8 * self._size_bytes).from_address(self.address)
            self._view = memoryview(array).cast("B")
        return self._view

    def unmap(self) -> None:
        if self._view is not None:
            self._view.release()
            self._view = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """For torch, which then holds on to this object: [size_bytes] of u8."""
        return {
            "shape": (self._size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def dmabuf(self) -> int:
        """A new descriptor of the whole mapping, by which a NIC reaches it."""
        return cudriver.dmabuf(self.address, self.mapped_bytes)

    def close(self) -> None:
        """No GPU and no NIC may use it any more. Idempotent."""
        self.unmap()
        self._undo.close()
        self._fd = -1


class NicWrites:
    """Makes pages that NICs have written visible to passes on the GPU. A completion comes to the
    host's memory by another way than the pages to the GPU's, and not every GPU keeps their order.

    It takes the place of memory.staged.Staging where there is no mirror.
    """

    def __init__(self, region: CumemRegion) -> None:
        """Makes the GPU's context current, for as long as the process lives."""
        cudriver.use(region.ordinal)
        self._flushes = not cudriver.orders_nic_writes(region.ordinal)

    def begin(self, *, fetch: Sequence[int], store: Sequence[int]) -> None:
        """Before a pass. `fetch`: pages that a peer wrote and this pass is the first to read;
        `store`, which it writes for a peer: it is there for NICs once the layer is raised."""
        del store
        if fetch and self._flushes:
            cudriver.flush_nic_writes()


def _rounded(size_bytes: int, unit: int) -> int:
    return -(-size_bytes // unit) * unit
