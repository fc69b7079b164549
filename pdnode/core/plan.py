"""The plan: who writes which bytes where, and how many page units the destination counts.

Both sides call these functions with the two geometries that `hello` exchanged, so that they cannot
disagree. Pure arithmetic.

A *route* carries a head range of every page from one source rank to one destination rank. Where R
source ranks hold a copy of the same heads (more ranks than KV heads, MLA), each chunk's pages are
cut into R contiguous pieces, equal within one page, and piece j for destination d comes from holder
`(d + j + sequence) mod R`. A *page unit* is one page of one layer over one route: what a weighted
immediate counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import sub
from typing import NamedTuple

from pdnode.core.geometry import KvGeometry

CONTEXT_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Route:
    """One head range of every page, from any of `holders` to `destination_rank`.

    Offsets and length in bytes inside a page of one layer. `whole_page`: the route covers the page
    on both sides, so writes of neighbouring pages may be merged.
    """

    destination_rank: int
    holders: tuple[int, ...]
    source_offset: int
    destination_offset: int
    length: int
    whole_page: bool


class PageSpan(NamedTuple):
    """`count` pages that are neighbours on both sides; page numbers in the two regions."""

    source: int
    destination: int
    count: int  # type: ignore[assignment]  # hides tuple.count


class Program(NamedTuple):
    """What to write from one source rank to one destination rank as each layer of a pass is done.

    The compiled core adds `layer * layer_stride` on both sides; all else holds for every layer.
    """

    source_rank: int
    destination_rank: int
    source_offset: int
    destination_offset: int
    length: int
    whole_page: bool
    spans: tuple[PageSpan, ...]

    @property
    def pages(self) -> int:
        return sum(span.count for span in self.spans)


def differences(here: KvGeometry, there: KvGeometry) -> list[str]:
    """Why these two cannot exchange pages, field by field with both values; empty if they can."""
    return [
        f"{field}: {getattr(here, field)} here, {getattr(there, field)} there"
        for field in ("kind", "layers", "kv_heads", "head_dim", "page_tokens", "dtype")
        if getattr(here, field) != getattr(there, field)
    ]


@lru_cache(maxsize=1024)  # asked for with every chunk; a node has few geometries of peers
def routes(source: KvGeometry, destination: KvGeometry) -> tuple[Route, ...]:
    """Every route, ordered by destination rank and head. Every destination byte is covered once."""
    assert not differences(source, destination)
    found = []
    for rank in range(destination.tp):
        wanted = destination.rank_heads(rank)
        head = wanted.start
        while head < wanted.stop:
            holders = tuple(r for r in range(source.tp) if head in source.rank_heads(r))
            held = source.rank_heads(holders[0])
            stop = min(held.stop, wanted.stop)
            length = (stop - head) * source.head_bytes
            found.append(
                Route(
                    destination_rank=rank,
                    holders=holders,
                    source_offset=(head - held.start) * source.head_bytes,
                    destination_offset=(head - wanted.start) * source.head_bytes,
                    length=length,
                    whole_page=length == source.page_bytes == destination.page_bytes,
                )
            )
            head = stop
    return tuple(found)


def sent_pages(prompt_tokens: int, page_tokens: int, first_page: int = 0) -> int:
    """Pages that travel for a prompt: those of all tokens but the last, from `first_page` on."""
    assert prompt_tokens >= 1
    return max(0, -(-(prompt_tokens - 1) // page_tokens) - first_page)


def chunk_pages(start: int, end: int, total: int, page_tokens: int, first_page: int = 0) -> range:
    """Page indexes that the chunk of tokens [start, end) of `total` sends.

    A page is sent once: when it is full, or with the last chunk. `start` is a page edge.
    """
    assert 0 <= start < end <= total
    assert start % page_tokens == 0
    assert end % page_tokens == 0 or end == total
    return range(max(first_page, start // page_tokens), max(first_page, -(-end // page_tokens)))


def expected_units(
    source: KvGeometry, destination: KvGeometry, pages: int, context_bytes: int = 0
) -> int:
    """Page units that one request's immediate counts, over all destination ranks, plus context."""
    per_page = source.layers * len(routes(source, destination))
    return pages * per_page + len(context_pieces(context_bytes))


def context_pieces(context_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of the writes that carry a context buffer, weight 1 each."""
    return [
        (offset, min(CONTEXT_PIECE_BYTES, context_bytes - offset))
        for offset in range(0, context_bytes, CONTEXT_PIECE_BYTES)
    ]


def split_evenly(pages: int, pieces: int) -> list[range]:
    """`pages` cut into `pieces` contiguous index ranges, equal within one page."""
    share, more = divmod(pages, pieces)
    starts = [piece * share + min(piece, more) for piece in range(pieces + 1)]
    return [range(starts[piece], starts[piece + 1]) for piece in range(pieces)]


def pair_spans(source: Sequence[int], destination: Sequence[int]) -> tuple[PageSpan, ...]:
    """Pairs two page lists of one length; neighbours on both sides become one span."""
    assert len(source) == len(destination)
    # map() and sub keep a run of 8,192 pages (a 131,072-token prompt) within a millisecond.
    steps = zip(map(sub, source[1:], source), map(sub, destination[1:], destination), strict=True)
    edges = [index for index, step in enumerate(steps, start=1) if step != (1, 1)]
    return tuple(
        PageSpan(source[start], destination[start], stop - start)
        for start, stop in pairwise([0, *edges, len(source)])
        if start < stop
    )


def programs(
    plan: Sequence[Route],
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    sequence: int,
) -> tuple[Program, ...]:
    """The layer programs of one chunk: page i of the chunk goes from source_pages[i] on.

    `sequence` is the number of the chunk in its request; it rotates the holders.
    """
    cuts = {  # the same for all routes with as many holders
        copies: [
            pair_spans(
                source_pages[part.start : part.stop], destination_pages[part.start : part.stop]
            )
            for part in split_evenly(len(source_pages), copies)
        ]
        for copies in {len(route.holders) for route in plan}
    }
    found = []
    for route in plan:
        copies = len(route.holders)
        for piece, spans in enumerate(cuts[copies]):
            if not spans:
                continue
            holder = route.holders[(route.destination_rank + piece + sequence) % copies]
            found.append(
                Program(
                    holder,
                    route.destination_rank,
                    route.source_offset,
                    route.destination_offset,
                    route.length,
                    route.whole_page,
                    spans,
                )
            )
    return tuple(found)
