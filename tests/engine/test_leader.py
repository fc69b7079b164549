"""The leader's layer counter: raised only when the layer's KV is in memory on every rank."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdnode.engine.attention import Segment, TorchAttention
from pdnode.models.passes import LatentUp
from tests.support.local_engine import LocalEngine, load_model
from tests.support.thread_ranks import ThreadRanks, on_ranks
from tests.support.tiny_families import write_family

TOKENS = [3 + (7 * n) % 300 for n in range(40)]
TP = 3
LAYERS = 3
WAIT_S = 60.0


class Progress:
    """How many sums the leader has begun: the embedding's, then two of each layer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = 0

    def begin(self) -> None:
        with self._changed:
            self._begun += 1
            self._changed.notify_all()

    def wait_for_attention_of(self, layer: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._begun >= 2 * layer + 2, WAIT_S)


class ToldRanks:
    """The leader's ranks; tells when a sum begins."""

    def __init__(self, inner: ThreadRanks, progress: Progress) -> None:
        self._inner = inner
        self._progress = progress
        self.rank, self.tp = inner.rank, inner.tp
        self.joined, self.least = inner.joined, inner.least

    def sum(self, part: Tensor) -> Tensor:
        self._progress.begin()
        return self._inner.sum(part)


class LateAttention:
    """The other ranks': stores a layer's KV only after the leader has begun that layer's sum."""

    def __init__(self, inner: TorchAttention, progress: Progress) -> None:
        self._inner = inner
        self._progress = progress

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._progress.wait_for_attention_of(layer)
        return self._inner.run(layer, queries, keys, values)

    def run_latent(self, layer: int, queries: Tensor, latents: Tensor, up: LatentUp) -> Tensor:
        self._progress.wait_for_attention_of(layer)
        return self._inner.run_latent(layer, queries, latents, up)


@pytest.mark.parametrize("family", ["llama tied llama3", "deepseek_v3"])
def test_a_raise_comes_after_the_last_rank_has_stored(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path, family)
    progress = Progress()
    engines: dict[int, LocalEngine] = {}
    begun = threading.Barrier(TP, timeout=WAIT_S)
    seen: list[list[bool]] = []

    def stored(layer: int, table: list[int]) -> bool:
        """Of every rank: whether each token of the pages has keys and values."""
        views = [engines[rank].views[layer] for rank in range(TP)]
        return all(
            bool(part[table].abs().sum((1, 3)).flatten()[: len(TOKENS)].all())
            for one in views
            for part in (one.keys, one.values)
        )

    def work(ranks: ThreadRanks) -> None:
        leads = ranks.rank == 0
        told = ToldRanks(ranks, progress) if leads else ranks
        engine = LocalEngine(load_model(path, ranks=told), pages=8)
        engines[ranks.rank] = engine
        begun.wait()
        table = engine.take(len(TOKENS))
        engine.attention.plan([Segment(0, len(TOKENS), table)])
        attention = engine.attention if leads else LateAttention(engine.attention, progress)
        raised = 0

        def layer_done() -> None:
            nonlocal raised
            if leads:
                seen.append([stored(layer, table) for layer in range(LAYERS)])
            raised += 1

        with torch.inference_mode():
            engine.model.forward(
                torch.tensor(TOKENS), torch.arange(len(TOKENS)), attention, layer_done, kv_only=True
            )
        assert raised == LAYERS

    on_ranks(TP, work)
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]
