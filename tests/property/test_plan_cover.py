"""The plan moves every byte: programs of any two geometries are carried out on numpy regions."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pdnode.core import plan
from pdnode.core.geometry import KvGeometry
from pdnode.core.plan import Program


@st.composite
def geometries(draw: st.DrawFn) -> tuple[KvGeometry, KvGeometry]:
    """Two sides of one model, with tensor parallelism and pool sizes of their own."""
    kind = draw(st.sampled_from(["gqa", "gqa", "mla"]))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8])) if kind == "gqa" else 1
    page_tokens = draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 3))
    head_dim = draw(st.integers(1, 3))

    def side() -> KvGeometry:
        ranks = [n for n in (1, 2, 3, 4, 6, 8) if kv_heads % n == 0 or n % kv_heads == 0]
        return KvGeometry(
            kind=kind,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_tokens=page_tokens,
            dtype="float16",
            tp=draw(st.sampled_from(ranks)),
            pages=draw(st.integers(12, 20)),
        )

    return side(), side()


def page_list(data: st.DataObject, side: KvGeometry, count: int) -> list[int]:
    """`count` pages of a side: one run, or scattered."""
    if data.draw(st.booleans()):
        first = data.draw(st.integers(0, side.pages - count))
        return list(range(first, first + count))
    return list(data.draw(st.permutations(range(side.pages))))[:count]


def chunk_edges(data: st.DataObject, tokens: int, page_tokens: int) -> list[int]:
    """Chunk ends: some page edges, and the end."""
    edges = list(range(page_tokens, tokens, page_tokens))
    chosen = data.draw(st.sets(st.sampled_from(edges))) if edges else set()
    return [0, *sorted(chosen), tokens]


def content(side: KvGeometry, rank: int) -> np.ndarray:
    """A rank's region, [layers, pages, heads, head_bytes]: bytes that name layer, page and head."""
    region = np.zeros((side.layers, side.pages, side.heads_per_rank, side.head_bytes), np.int64)
    for layer in range(side.layers):
        for page in range(side.pages):
            for index, head in enumerate(side.rank_heads(rank)):
                name = ((layer * 64 + page) * 64 + head) * 64
                region[layer, page, index] = name + np.arange(side.head_bytes)
    return region


def carry_out(
    program: Program,
    sides: tuple[KvGeometry, KvGeometry],
    regions: tuple[list[np.ndarray], list[np.ndarray]],
    written: list[np.ndarray],
) -> int:
    """What the transfer core does with a program; returns the page units."""
    source, destination = sides
    read = regions[0][program.source_rank].reshape(-1)
    write = regions[1][program.destination_rank].reshape(-1)
    times = written[program.destination_rank].reshape(-1)
    units = 0
    for layer in range(source.layers):
        for span in program.spans:
            if program.whole_page:  # may be merged: one write for the span
                assert program.source_offset == program.destination_offset == 0
                pieces = [(span.source, span.destination, span.count * program.length)]
            else:
                pieces = [
                    (span.source + i, span.destination + i, program.length)
                    for i in range(span.count)
                ]
            for from_page, to_page, length in pieces:
                start = layer * source.layer_stride + from_page * source.page_bytes
                start += program.source_offset
                stop = layer * destination.layer_stride + to_page * destination.page_bytes
                stop += program.destination_offset
                write[stop : stop + length] = read[start : start + length]
                times[stop : stop + length] += 1
            units += span.count
    return units


@settings(max_examples=300)
@given(data=st.data())
def test_every_byte_lands_once_and_is_counted(data: st.DataObject) -> None:
    source, destination = data.draw(geometries())
    prompt = data.draw(st.integers(1, 12 * source.page_tokens + 1))
    first_page = data.draw(st.integers(0, 3))
    tokens = prompt - 1
    pages = source.pages_for(tokens)
    from_pages = page_list(data, source, pages)
    to_pages = page_list(data, destination, pages)
    regions = (
        [content(source, rank) for rank in range(source.tp)],
        [np.zeros_like(content(destination, rank)) for rank in range(destination.tp)],
    )
    written = [np.zeros_like(region) for region in regions[1]]

    routes = plan.routes(source, destination)
    units = 0
    edges = chunk_edges(data, tokens, source.page_tokens) if tokens else []
    for number, (start, end) in enumerate(pairwise(edges)):
        sent = plan.chunk_pages(start, end, tokens, source.page_tokens, first_page)
        for program in plan.programs(
            routes, [from_pages[i] for i in sent], [to_pages[i] for i in sent], number
        ):
            units += carry_out(program, (source, destination), regions, written)

    count = plan.sent_pages(prompt, source.page_tokens, first_page)
    assert units == plan.expected_units(source, destination, count)
    wanted = list(range(first_page, pages))
    assert len(wanted) == count
    for rank in range(destination.tp):
        heads = destination.rank_heads(rank)
        for layer in range(destination.layers):
            times = np.zeros(written[rank].shape[1:], np.int64)
            times[[to_pages[i] for i in wanted]] = 1
            assert (written[rank][layer] == times).all(), "each byte wanted once, no other at all"
            for i in wanted:
                for index, head in enumerate(heads):
                    name = ((layer * 64 + from_pages[i]) * 64 + head) * 64
                    got = regions[1][rank][layer, to_pages[i], index]
                    assert (got == name + np.arange(destination.head_bytes)).all()


@given(data=st.data())
def test_every_page_is_sent_by_one_chunk(data: st.DataObject) -> None:
    page_tokens = data.draw(st.integers(1, 5))
    tokens = data.draw(st.integers(1, 60))
    first_page = data.draw(st.integers(0, 15))
    edges = chunk_edges(data, tokens, page_tokens)
    sent = [
        page
        for start, end in pairwise(edges)
        for page in plan.chunk_pages(start, end, tokens, page_tokens, first_page)
    ]
    assert sent == list(range(first_page, -(-tokens // page_tokens)))
    assert len(sent) == plan.sent_pages(tokens + 1, page_tokens, first_page)


@given(data=st.data())
def test_copies_work_evenly(data: st.DataObject) -> None:
    source, destination = data.draw(geometries())
    pages = data.draw(st.integers(0, 40))
    number = data.draw(st.integers(0, 20))
    routes = plan.routes(source, destination)
    found = plan.programs(routes, list(range(pages)), list(range(100, 100 + pages)), number)
    for route in routes:
        shares = {
            program.source_rank: program.pages
            for program in found
            if program.destination_rank == route.destination_rank
            and program.destination_offset == route.destination_offset
        }
        assert sum(shares.values()) == pages
        assert shares.keys() <= set(route.holders)
        copies = len(route.holders)
        assert all(share in (pages // copies, -(-pages // copies)) for share in shares.values())
        if pages >= copies:
            assert shares.keys() == set(route.holders)
    for program in found:
        assert len(program.spans) == 1, "a run stays a run in every piece"


@given(data=st.data())
def test_spans_pair_every_page_and_are_maximal(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.sampled_from([1, 1, 1, 2]), max_size=30))
    source = [sum(steps[:i]) for i in range(len(steps))]
    other = data.draw(
        st.lists(st.sampled_from([1, 1, 1, 2]), min_size=len(steps), max_size=len(steps))
    )
    destination = [sum(other[:i]) for i in range(len(other))]
    spans = plan.pair_spans(source, destination)
    pairs = [(s.source + i, s.destination + i) for s in spans for i in range(s.count)]
    assert pairs == list(zip(source, destination, strict=True))
    for span, after in pairwise(spans):
        assert (span.source + span.count, span.destination + span.count) != after[:2]


@given(context_bytes=st.integers(0, 5_000_000))
def test_context_pieces_cover_the_context(context_bytes: int) -> None:
    end = 0
    for offset, length in plan.context_pieces(context_bytes):
        assert offset == end
        assert 0 < length <= 256 * 1024
        end += length
    assert end == context_bytes
