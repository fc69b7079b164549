"""Every byte of every sharding, on the real core and fabric, against formulas of this file alone.

Nothing here asks core/plan.py: who held which head, how a chunk was cut and how many writes that
takes is derived from the definition of a sharding and from what landed.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import msgspec
import numpy as np
import pytest

from pdnode.core.hello import agree
from pdnode.core.pages import PagePool
from pdnode.core.wire import Geometry
from pdnode.types import Role, Run, expand_runs
from tests.shardings.pair import Cores, Pair
from tests.shardings.pattern import (
    CANARY,
    HEAD,
    LAYER,
    LAYERS,
    PAGE,
    PAGE_TOKENS,
    PART,
    POSITION,
    RANK,
    UNWRITTEN,
    Group,
    geometry,
)
from tests.support.link_nodes import hello

HEADS = (1, 2, 3, 4, 8)
MOST_RANKS = 8
TOKENS = (82, 70, 22)  # of the prompts without their last token; in chunks of up to nine pages
WORDS_OF_HEAD = PAGE_TOKENS * 6  # K or V of one head in a page of one layer
WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranks of a group and number of groups, on both sides. Heads 0: MLA."""

    heads: int
    prefill: tuple[int, int]  # tp, dp
    decode: tuple[int, int]

    def __str__(self) -> str:
        model = f"gqa{self.heads}" if self.heads else "mla"
        sides = (
            f"tp{tp}" + (f"dp{dp}" if dp > 1 else "") for tp, dp in (self.prefill, self.decode)
        )
        return f"{model}-{'-to-'.join(sides)}"

    def held(self, tp: int, rank: int) -> list[int]:
        """KV heads of a rank: equal shares, or one head that neighbouring ranks have copies of."""
        if not self.heads or tp >= self.heads:
            return [rank * self.heads // tp]
        return [head for head in range(self.heads) if head * tp // self.heads == rank]

    def holders(self, head: int) -> list[int]:
        """Ranks of a prefill group that have this head."""
        tp = self.prefill[0]
        return [rank for rank in range(tp) if head in self.held(tp, rank)]

    @property
    def routes(self) -> int:
        """Pieces that a page of a layer comes in, over all ranks of a decode group."""
        source, target = self.prefill[0], self.decode[0]
        if not self.heads:
            return target
        if max(source, target) > self.heads:  # one head each
            return max(target, self.heads)
        return source + target - math.gcd(source, target)  # cuts of the heads on either side

    @property
    def group_words(self) -> int:
        """Words that a page of a layer takes in a decode group."""
        if not self.heads:
            return self.decode[0] * WORDS_OF_HEAD
        return max(self.decode[0], self.heads) * 2 * WORDS_OF_HEAD


def can_slice(heads: int, tp: int) -> bool:
    return not heads or heads % tp == 0 or tp % heads == 0


RANKS = range(1, MOST_RANKS + 1)
ALIKE = [
    Shape(heads, (source, 1), (target, 1))
    for heads in (0, *HEADS)
    for source in RANKS
    for target in RANKS
    if can_slice(heads, source) and can_slice(heads, target)
]
# (heads, (tp, dp) of prefill, (tp, dp) of decode)
SPREAD = [
    Shape(*one)
    for one in (
        (0, (1, 1), (1, 2)), (0, (1, 1), (1, 4)), (0, (8, 1), (1, 4)), (0, (4, 1), (2, 2)),
        (0, (1, 2), (1, 1)), (0, (1, 4), (1, 4)), (0, (2, 2), (2, 2)), (0, (2, 4), (4, 2)),
        (0, (3, 2), (2, 3)), (0, (1, 3), (8, 1)), (0, (8, 1), (8, 2)), (0, (5, 1), (3, 2)),
        (0, (4, 2), (1, 3)), (0, (2, 3), (1, 4)), (1, (1, 2), (2, 2)), (1, (4, 1), (2, 3)),
        (1, (3, 2), (1, 4)), (1, (2, 4), (3, 1)), (2, (1, 2), (2, 2)), (2, (2, 1), (1, 3)),
        (2, (4, 2), (2, 2)), (2, (2, 2), (4, 2)), (2, (8, 1), (4, 2)), (2, (6, 1), (1, 2)),
        (3, (1, 2), (3, 2)), (3, (3, 2), (1, 4)), (3, (6, 1), (3, 2)), (3, (3, 1), (6, 2)),
        (4, (1, 4), (4, 1)), (4, (4, 1), (1, 4)), (4, (2, 2), (4, 2)), (4, (4, 2), (2, 3)),
        (4, (8, 1), (2, 2)), (4, (2, 3), (8, 1)), (8, (1, 2), (8, 2)), (8, (8, 2), (1, 3)),
        (8, (2, 2), (4, 3)), (8, (4, 3), (2, 2)), (8, (8, 1), (4, 2)), (8, (2, 4), (2, 4)),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def cores() -> Iterator[Cores]:
    found = Cores()
    yield found
    found.close()


def test_the_lists_are_whole() -> None:
    assert Counter(shape.heads for shape in ALIKE) == {0: 64, 1: 64, 2: 25, 3: 9, 4: 16, 8: 16}
    assert len(set(SPREAD)) == 40
    assert all(max(shape.prefill[1], shape.decode[1]) in (2, 3, 4) for shape in SPREAD)


@pytest.mark.parametrize("shape", [*ALIKE, *SPREAD], ids=str)
async def test_every_byte_lands_where_it_belongs(cores: Cores, shape: Shape) -> None:
    kind = "gqa" if shape.heads else "mla"
    heads = max(1, shape.heads)
    pair = Pair(
        cores,
        geometry(kind=kind, kv_heads=heads, tp=shape.prefill[0], pages=160),
        shape.prefill[1],
        geometry(kind=kind, kv_heads=heads, tp=shape.decode[0], pages=160),
        shape.decode[1],
        reduces=bool(shape.heads),
    )
    try:
        for number, pool in enumerate(pair.source_pools):
            scatter(pool, step=number + 2)
        before = cores.sender.statistics(), cores.target.statistics()
        prompts = []
        for number in range(max(2, *(dp for _, dp in (shape.prefill, shape.decode)))):
            group, length = number % shape.decode[1], TOKENS[number % len(TOKENS)]
            if number == 1:
                scatter(pair.pools[group], step=3)
            pages = pair.pools[group].reserve(-(-length // PAGE_TOKENS))
            prompts.append((group, pages, (number, *[7] * length)))
        await pair.run(prompts)
        found = [Landed(shape, pair, number, *one) for number, one in enumerate(prompts)]
        for one in found:
            one.check()
        check_canaries(pair, prompts)
        check_counters(cores, before, shape, found)
    finally:
        pair.close()


class Landed:
    """One request, as its group's memory has it."""

    def __init__(
        self, shape: Shape, pair: Pair, number: int, group: int, pages: tuple[Run, ...],
        prompt: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.shape = shape
        self.tokens = len(prompt) - 1
        self.targets = expand_runs(pages)[: -(-self.tokens // PAGE_TOKENS)]
        self.group: Group = pair.targets[group]
        chunks = [model.chunks_of(prompt) for model in pair.models]
        (self.source,) = [index for index, found in enumerate(chunks) if found]
        self.chunks = chunks[self.source]
        self.sources = list(self.chunks[-1].pages)
        self.segments = pair.cores.segments
        self.writes = 0
        self.units = 0

    def check(self) -> None:
        edges = [(chunk.start, chunk.end) for chunk in self.chunks]
        assert edges[0][0] == 0
        assert edges[-1][1] == self.tokens
        assert all(one[1] == two[0] for one, two in pairwise(edges))
        for rank, memory in enumerate(self.group.memories):
            self._check_rank(rank, memory[:, self.targets])

    def _check_rank(self, rank: int, pages: np.ndarray) -> None:
        """`pages`: [L, pages of the request, Hr, parts, T, D]."""
        heads = self.shape.held(self.shape.decode[0], rank)
        first = self.source * self.shape.prefill[0]
        senders = pages[:, :, :, 0, 0, RANK].astype(int) - first  # every page has a token in slot 0
        wanted = np.full(pages.shape, UNWRITTEN, np.uint32)
        index = np.ogrid[tuple(map(slice, pages.shape[:-1]))]
        layer, page, head, part, slot = index
        position = page * PAGE_TOKENS + slot
        columns = {
            PAGE: np.array(self.sources)[page],
            LAYER: layer,
            RANK: first + senders[..., None, None],
            HEAD: np.array(heads)[head],
            PART: part,
            POSITION: position,
        }
        there = np.broadcast_to(position < self.tokens, pages.shape[:-1])
        for column, value in columns.items():
            wanted[..., column] = np.where(there, value, UNWRITTEN)
        assert np.array_equal(pages, wanted)
        assert (senders == senders[0]).all(), "the same rank in every layer"
        for at, number in enumerate(heads):
            self._check_copies(rank, number, senders[0, :, at])
        self._count_writes(rank, heads, senders[0])

    def _check_copies(self, rank: int, head: int, senders: np.ndarray) -> None:
        """`senders`: rank of the group that sent each page of this head."""
        holders = self.shape.holders(head)
        assert set(senders) <= set(holders)
        copies = len(holders)
        for number, chunk in enumerate(self.chunks):
            of_chunk = senders[chunk.start // PAGE_TOKENS : -(-chunk.end // PAGE_TOKENS)]
            sent = Counter(of_chunk.tolist())
            if len(of_chunk) >= copies:
                assert set(sent) == set(holders), "every one that has a copy sends"
            shares = [sent[holder] for holder in holders]
            assert max(shares) - min(shares) <= 1
            pieces = [one for one, _ in groupby(of_chunk.tolist())]
            turned = [holders[(rank + piece + number) % copies] for piece in range(len(pieces))]
            assert pieces == turned, "contiguous, and each destination and chunk begins elsewhere"

    def _count_writes(self, rank: int, heads: list[int], senders: np.ndarray) -> None:
        """Operations and page units of one layer, piece by piece of what each sender sent."""
        for chunk in self.chunks:
            part = range(chunk.start // PAGE_TOKENS, -(-chunk.end // PAGE_TOKENS))
            for sender in set(senders[part.start : part.stop].reshape(-1).tolist()):
                mine = [page for page in part if sender in senders[page]]
                whole = self.shape.held(self.shape.prefill[0], sender) == heads
                runs = 1 + sum(not self._next(one, two) for one, two in pairwise(mine))
                self.writes += LAYERS * -(-(runs if whole else len(mine)) // self.segments)
                self.units += LAYERS * len(mine)

    def _next(self, one: int, two: int) -> bool:
        """Whether two pages of the prompt are neighbours on both sides."""
        sides = (self.sources, self.targets)
        return two == one + 1 and all(side[two] == side[one] + 1 for side in sides)


def scatter(pool: PagePool, *, step: int) -> None:
    """Leaves free pages in runs of one, two, … `step`, with a page in use after each."""
    free = expand_runs(pool.reserve(pool.counts.free))
    start = turn = 0
    while start < len(free):
        count = 1 + turn % step
        for page in free[start : start + count]:
            pool.release((Run(page, 1),))
        start += count + 1
        turn += 1


def check_canaries(pair: Pair, prompts: list[tuple[int, tuple[Run, ...], tuple[int, ...]]]) -> None:
    """Nothing but the pages that were sent has changed, in any group."""
    for number, group in enumerate(pair.targets):
        untouched = np.ones(group.geometry.pages, bool)
        for of, pages, prompt in prompts:
            if of == number:
                untouched[expand_runs(pages)[: -(-(len(prompt) - 1) // PAGE_TOKENS)]] = False
        for memory in group.memories:
            assert (memory[:, untouched] == CANARY).all()


def check_counters(
    cores: Cores,
    before: tuple[dict[str, int], dict[str, int]],
    shape: Shape,
    found: list[Landed],
) -> None:
    sent, got = (
        {name: now[name] - then[name] for name in now}
        for now, then in zip(
            (cores.sender.statistics(), cores.target.statistics()), before, strict=True
        )
    )
    pages = sum(len(one.targets) for one in found)
    assert sent["posted_bytes"] == pages * LAYERS * shape.group_words * WORD_BYTES
    units = pages * LAYERS * shape.routes
    assert sent["posted_pages"] == got["received_units"] == units
    assert sum(one.units for one in found) == units
    assert sent["posted_writes"] == sum(one.writes for one in found)
    assert got["overshoots"] == got["late_immediates"] == 0


@pytest.mark.parametrize("heads", HEADS)
def test_what_cannot_be_sliced_is_refused_with_both_numbers(heads: int) -> None:
    """Of either side, and of every pair where the other side can."""
    refused = 0
    for here in (tp for tp in RANKS if can_slice(heads, tp)):
        for there in RANKS:
            ours = Geometry("gqa", 2, heads, 8, 16, "float32", here, 50)
            theirs = msgspec.structs.replace(ours, tp=there)
            for role, other in ((Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)):
                result = agree(hello(role, geometry=ours), hello(other, geometry=theirs))
                if can_slice(heads, there):
                    assert not isinstance(result, list), result
                    continue
                text = (
                    f"tp: {here} here, {there} there: {there} ranks cannot slice {heads} KV heads"
                )
                assert result == [text]
                refused += 1
    slicing = sum(can_slice(heads, tp) for tp in RANKS)
    assert refused == 2 * slicing * (MOST_RANKS - slicing)
