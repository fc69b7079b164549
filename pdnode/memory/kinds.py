"""The KV region of a worker, of the kind that its daemon asks for."""

from pdnode.memory import cudriver
from pdnode.memory.cumem import CumemRegion
from pdnode.memory.region import MemfdRegion
from pdnode.memory.staged import StagedRegion
from pdnode.types import RegionKind

KvRegion = MemfdRegion | CumemRegion | StagedRegion
_NAME = "pdnode-kv"


def create_region(
    kind: RegionKind, size_bytes: int, *, gpu: str = "", huge_pages: bool = False
) -> KvRegion:
    """`gpu`: its number, PCI address or UUID, for kinds in device memory. CudaError or MemoryError
    where it cannot be had."""
    if kind is RegionKind.MEMFD:
        return MemfdRegion.create(_NAME, size_bytes, huge_pages=huge_pages)
    ordinal = cudriver.find_gpu(gpu).ordinal
    if kind is RegionKind.STAGED:
        return StagedRegion.create(_NAME, ordinal, size_bytes, huge_pages=huge_pages)
    return CumemRegion.create(ordinal, size_bytes)
