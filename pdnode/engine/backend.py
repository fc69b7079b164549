"""What differs between the devices that a worker runs on, behind one interface."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import AttentionBackend, TorchAttention
from pdnode.engine.graphs import DecodeGraphs
from pdnode.engine.protocol import Init
from pdnode.engine.sampler import Sampler, sample_each
from pdnode.errors import Problem
from pdnode.fabric._native import LayerCounter
from pdnode.memory.kinds import KvRegion
from pdnode.memory.layout import LayerViews
from pdnode.memory.region import MemfdRegion, available_bytes
from pdnode.models.decoder import Decoder

# Of the free memory, where the daemon names no size: leaves room for a second node on the host,
# for activations and for everything that is not ours.
AUTO_POOL_RATIO = 0.25


class Backend(Protocol):
    """One device, for one model. All calls come from the worker's only thread."""

    @property
    def device(self) -> torch.device: ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def waits(self) -> bool:
        """No stream orders passes and copies: each copy is waited for."""

    def problems(self) -> list[Problem]:
        """Why this device cannot run this model as it is asked to."""

    def auto_pool_bytes(self) -> int:
        """For KV memory where the daemon names no size, once the weights are loaded."""

    def region_bytes(self, region: KvRegion) -> memoryview | Tensor:
        """A region's bytes as passes see them."""

    def attention(self, layers: Sequence[LayerViews], geometry: KvGeometry) -> AttentionBackend: ...

    def counter(self, page: MemfdRegion, wake_fds: list[int]) -> Callable[[], None]:
        """What raises the layer counter in `page`, behind all that the pass has done so far."""

    def graphs(
        self,
        model: Decoder,
        layers: Sequence[LayerViews],
        geometry: KvGeometry,
        raise_layer: Callable[[], None],
    ) -> DecodeGraphs | None:
        """Recorded decode passes, where the device has such; writes to the pages meanwhile."""

    def stream(self) -> int:
        """That of the passes, as the driver's number."""

    def finish(self) -> None:
        """Wait until the device has done all that it was given."""


class CpuBackend:
    """Passes on the threads of this process."""

    device = torch.device("cpu")
    sampler = staticmethod(sample_each)
    waits = True

    def __init__(self, init: Init, dtype: torch.dtype) -> None:
        self._init = init
        self._dtype = dtype

    def problems(self) -> list[Problem]:
        return []

    def auto_pool_bytes(self) -> int:
        return int(available_bytes() * AUTO_POOL_RATIO / self._init.sharers)

    def region_bytes(self, region: KvRegion) -> memoryview | Tensor:
        return region.map()

    def attention(self, layers: Sequence[LayerViews], geometry: KvGeometry) -> AttentionBackend:
        return TorchAttention(layers, geometry, self._dtype)

    def counter(self, page: MemfdRegion, wake_fds: list[int]) -> Callable[[], None]:
        return LayerCounter(page.fd, wake_fds).raise_layer

    def graphs(
        self,
        model: Decoder,
        layers: Sequence[LayerViews],
        geometry: KvGeometry,
        raise_layer: Callable[[], None],
    ) -> DecodeGraphs | None:
        return None

    def stream(self) -> int:
        return 0

    def finish(self) -> None:
        pass
