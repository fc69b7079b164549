"""KV memory of a GPU with a mirror in host memory, for NICs that cannot reach the GPU.

The daemon and the NICs see the mirror alone, and it looks like any memfd. The worker copies what
its GPU has computed to the mirror before it raises the layer, and what a peer has written from the
mirror before the first pass that reads it. All on the worker's stream, so that nothing waits.
"""

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Self

from pdnode.core.geometry import KvGeometry
from pdnode.memory import cudriver
from pdnode.memory.cumem import CumemRegion
from pdnode.memory.region import MemfdRegion


class StagedRegion:
    """One rank's KV, twice. `fd` is the mirror's, the other properties are the GPU's."""

    def __init__(self, gpu: CumemRegion, mirror: MemfdRegion) -> None:
        """Takes over both, also where it fails."""
        self.gpu = gpu
        self._mirror = mirror
        self.memory_page_bytes = mirror.memory_page_bytes
        with contextlib.ExitStack() as undo:
            undo.callback(mirror.close)
            undo.callback(gpu.close)
            cudriver.use(gpu.ordinal)
            undo.callback(cudriver.let_go, gpu.ordinal)
            self.mirror_address = _address(mirror.map())
            cudriver.register_host(self.mirror_address, mirror.size_bytes)
            undo.callback(cudriver.unregister_host, self.mirror_address)
            self._undo = undo.pop_all()

    @classmethod
    def create(cls, name: str, ordinal: int, size_bytes: int, *, huge_pages: bool = False) -> Self:
        """CudaError or MemoryError where there is too little of the GPU's or the host's memory.
        `huge_pages`: of the mirror, as MemfdRegion.create."""
        gpu = CumemRegion.create(ordinal, size_bytes)
        try:
            mirror = MemfdRegion.create(name, size_bytes, huge_pages=huge_pages)
        except BaseException:
            gpu.close()
            raise
        return cls(gpu, mirror)

    @property
    def fd(self) -> int:
        return self._mirror.fd

    @property
    def size_bytes(self) -> int:
        return self._mirror.size_bytes

    def map(self) -> memoryview:
        """The GPU's bytes, as CumemRegion.map."""
        return self.gpu.map()

    def unmap(self) -> None:
        self.gpu.unmap()

    def close(self) -> None:
        self._undo.close()


class Staging:
    """Copies pages between a staged region and its mirror, in the order of the worker's stream.

    `begin` before a pass, `layer_written` in each layer once K and V of the pass are in the GPU's
    pages and *before* the sum over the ranks: rank 0 raises the layer for all of them after it.
    """

    def __init__(
        self, region: StagedRegion, geometry: KvGeometry, stream: Callable[[], int], *, waits: bool
    ) -> None:
        """`stream`: that of the passes. `waits`: each call until its copies are done, for passes
        that no stream orders (a model on the CPU)."""
        self._gpu = region.gpu.address
        self._mirror = region.mirror_address
        self._geometry = geometry
        self._stream = stream
        self._waits = waits
        self._store: list[tuple[int, int]] = []

    def begin(self, *, fetch: Sequence[int], store: Sequence[int]) -> None:
        """`fetch`: pages that a peer wrote, whole, to the GPU now. `store`: pages that this pass
        writes for a peer, to the mirror layer by layer."""
        self._store = _runs(store)
        runs = _runs(fetch)
        for layer in range(self._geometry.layers):
            for run in runs:
                at, size = self._piece(layer, run)
                cudriver.copy_to_device(
                    device=self._gpu + at,
                    host=self._mirror + at,
                    size_bytes=size,
                    stream=self._stream(),
                )
        self._wait(runs)

    def layer_written(self, layer: int) -> None:
        for run in self._store:
            at, size = self._piece(layer, run)
            cudriver.copy_to_host(
                host=self._mirror + at,
                device=self._gpu + at,
                size_bytes=size,
                stream=self._stream(),
            )
        self._wait(self._store)

    def _piece(self, layer: int, run: tuple[int, int]) -> tuple[int, int]:
        """Where neighbouring pages of a layer begin in the region, and how many bytes they are."""
        first, count = run
        page_bytes = self._geometry.page_bytes
        return layer * self._geometry.layer_stride + first * page_bytes, count * page_bytes

    def _wait(self, runs: Sequence[tuple[int, int]]) -> None:
        if runs and self._waits:
            cudriver.synchronize(self._stream())


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of neighbouring pages."""
    found = []
    for _, group in itertools.groupby(enumerate(sorted(pages)), lambda item: item[1] - item[0]):
        run = [page for _, page in group]
        found.append((run[0], len(run)))
    return found


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_uint8.from_buffer(view))
