"""KV memory whose every word says where it was computed, and a null model that fills it.

A rank's region is read as 32-bit words, `[L, P, Hr, 2 (K,V), T, D]` (MLA: `[L, P, 1, 1, T, D]`)
with D = 6: page of the source, layer, rank of the source node, KV head, K or V, position in the
prompt.
"""

import asyncio
import mmap
import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdnode.core.geometry import KvGeometry
from pdnode.engine.protocol import COUNTER_PAGE_BYTES, Step, StepDone
from pdnode.fabric._native import Fabric, LayerCounter
from pdnode.messenger.groups import SourceRegion

Words = npt.NDArray[np.uint32]

PAGE, LAYER, RANK, HEAD, PART, POSITION = range(6)
UNWRITTEN = 0xCCCC_CCCC  # what the source holds where no token was computed
CANARY = 0xEEEE_EEEE  # what the destination holds where nothing was written
LAYERS = 3
PAGE_TOKENS = 4


def geometry(*, kind: str, kv_heads: int, tp: int, pages: int) -> KvGeometry:
    return KvGeometry(kind, LAYERS, kv_heads, 6, PAGE_TOKENS, "float32", tp, pages)


def shape(side: KvGeometry) -> tuple[int, ...]:
    parts = 2 if side.kind == "gqa" else 1
    return (side.layers, side.pages, side.heads_per_rank, parts, side.page_tokens, side.head_dim)


@dataclass(slots=True, eq=False)
class Group:
    """The memory of a TP group in a core: a region a rank, filled with one word."""

    fabric: Fabric
    geometry: KvGeometry
    first_rank: int  # of the node
    fill: int
    memories: list[Words] = field(init=False, default_factory=list)
    regions: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        side = self.geometry
        for _ in range(side.tp):
            fd = os.memfd_create("kv")
            os.ftruncate(fd, side.region_bytes)
            mapped = mmap.mmap(fd, side.region_bytes)
            words = np.frombuffer(mapped, np.uint32).reshape(shape(side))
            words[:] = self.fill
            self.memories.append(words)
            self.regions.append(self.fabric.add_region(0, fd, side.region_bytes, side.page_bytes))
            os.close(fd)

    def close(self) -> None:
        """After the fence of every session that has the regions."""
        for region in self.regions:
            self.fabric.remove_region(region)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk that was computed: tokens [start, end) into these pages of the prompt."""

    start: int
    end: int
    pages: tuple[int, ...]  # of the source: all of the sequence


class NullModel:
    """As daemon.steps.StepWorker. `reduces`: the attention ends in an all-reduce, so that the first
    rank raises the group's counter when all have written; else each rank raises its own."""

    def __init__(self, group: Group, *, reduces: bool) -> None:
        self.base = 0
        self._chunks: dict[int, list[Chunk]] = {}  # by sequence
        self._first: dict[int, int] = {}  # by first token of a prompt: its sequence
        self.group = group
        self._reduces = reduces
        self._pages: dict[int, list[int]] = {}
        self._counters: list[LayerCounter] = []
        self._numbers: list[int] = []
        for _ in range(1 if reduces else group.geometry.tp):
            fd = os.memfd_create("counter")
            os.ftruncate(fd, COUNTER_PAGE_BYTES)
            self._numbers.append(group.fabric.add_counter(fd))
            self._counters.append(LayerCounter(fd, [group.fabric.wake_fd(0)]))
            os.close(fd)

    def regions(self) -> tuple[SourceRegion, ...]:
        return tuple(
            SourceRegion(region, self._numbers[0 if self._reduces else rank])
            for rank, region in enumerate(self.group.regions)
        )

    def chunks_of(self, prompt: tuple[int, ...]) -> list[Chunk]:
        """What was computed here of the prompt that begins with this token; empty: nothing."""
        sequence = self._first.get(prompt[0])
        return [] if sequence is None else self._chunks[sequence]

    async def step(self, step: Step) -> StepDone:
        assert step.base == self.base
        for part in step.sequences:
            pages = self._pages.setdefault(part.sequence, [])
            pages += part.new_pages
            end = part.start + len(part.tokens)
            if part.start == 0:
                self._first[part.tokens[0]] = part.sequence
            done = self._chunks.setdefault(part.sequence, [])
            done.append(Chunk(part.start, end, tuple(pages)))
        for layer in range(self.group.geometry.layers):
            for rank in range(self.group.geometry.tp):
                for part in step.sequences:
                    end = part.start + len(part.tokens)
                    self._write(layer, rank, self._pages[part.sequence], part.start, end)
                if not self._reduces:
                    self._counters[rank].raise_layer()
                    await asyncio.sleep(0)
            if self._reduces:
                self._counters[0].raise_layer()
                await asyncio.sleep(0)
        self.base += self.group.geometry.layers
        return StepDone(step.pass_id, [], 0.0)

    def _write(self, layer: int, rank: int, pages: list[int], start: int, end: int) -> None:
        side = self.group.geometry
        memory = self.group.memories[rank]
        heads = side.rank_heads(rank)
        for position in range(start, end):
            page, slot = pages[position // side.page_tokens], position % side.page_tokens
            cell = memory[layer, page, :, :, slot]  # [Hr, parts, D]
            cell[..., PAGE] = page
            cell[..., LAYER] = layer
            cell[..., RANK] = self.group.first_rank + rank
            cell[..., HEAD] = np.arange(heads.start, heads.stop)[:, None]
            cell[..., PART] = np.arange(cell.shape[1])
            cell[..., POSITION] = position

    def close(self) -> None:
        for number in self._numbers:
            self.group.fabric.remove_counter(number)
