"""Attention over a staged region: what a layer has written goes to the mirror as well."""

from collections.abc import Sequence

from torch import Tensor

from pdnode.engine.attention import AttentionBackend, Segment
from pdnode.memory.staged import Staging
from pdnode.models.passes import LatentUp


class StagedAttention:
    """An AttentionBackend around another one. The copies lie behind the append of K and V and
    before the output projection's sum over the ranks."""

    def __init__(self, inner: AttentionBackend, staging: Staging) -> None:
        self._inner = inner
        self._staging = staging

    def plan(self, segments: Sequence[Segment]) -> None:
        self._inner.plan(segments)

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mixed = self._inner.run(layer, queries, keys, values)
        self._staging.layer_written(layer)
        return mixed

    def run_latent(self, layer: int, queries: Tensor, latents: Tensor, up: LatentUp) -> Tensor:
        mixed = self._inner.run_latent(layer, queries, latents, up)
        self._staging.layer_written(layer)
        return mixed
