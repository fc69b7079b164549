"""The plan by hand: routes, pieces, spans, counts; the rest is in property/test_plan_cover.py."""

import dataclasses

import pytest

from pdnode.core import plan
from pdnode.core.geometry import KvGeometry
from pdnode.core.plan import PageSpan, Route

PAGE = 2 * 16 * 64 * 4  # bytes of one head in a page


def geometry(*, kv_heads: int = 4, tp: int = 1, kind: str = "gqa", pages: int = 50) -> KvGeometry:
    return KvGeometry(
        kind=kind,
        layers=5,
        kv_heads=kv_heads,
        head_dim=64,
        page_tokens=16,
        dtype="float32",
        tp=tp,
        pages=pages,
    )


def test_equal_ranks_send_whole_pages_rank_to_rank() -> None:
    assert plan.routes(geometry(tp=2), geometry(tp=2)) == (
        Route(0, (0,), 0, 0, 2 * PAGE, whole_page=True),
        Route(1, (1,), 0, 0, 2 * PAGE, whole_page=True),
    )


def test_a_rank_is_fed_by_two() -> None:
    assert plan.routes(geometry(tp=4), geometry(tp=2)) == (
        Route(0, (0,), 0, 0, PAGE, whole_page=False),
        Route(0, (1,), 0, PAGE, PAGE, whole_page=False),
        Route(1, (2,), 0, 0, PAGE, whole_page=False),
        Route(1, (3,), 0, PAGE, PAGE, whole_page=False),
    )


def test_a_rank_feeds_two() -> None:
    assert plan.routes(geometry(tp=1), geometry(tp=2)) == (
        Route(0, (0,), 0, 0, 2 * PAGE, whole_page=False),
        Route(1, (0,), 2 * PAGE, 0, 2 * PAGE, whole_page=False),
    )


def test_head_ranges_that_do_not_nest_intersect() -> None:
    found = plan.routes(geometry(kv_heads=6, tp=2), geometry(kv_heads=6, tp=3))
    assert [(r.destination_rank, r.holders, r.length // PAGE) for r in found] == [
        (0, (0,), 2),
        (1, (0,), 1),
        (1, (1,), 1),
        (2, (1,), 2),
    ]
    assert [(r.source_offset // PAGE, r.destination_offset // PAGE) for r in found] == [
        (0, 0),
        (2, 0),
        (0, 1),
        (1, 0),
    ]


def test_copies_share_the_work() -> None:
    latent = geometry(kind="mla", kv_heads=1, tp=3)
    wide = plan.routes(latent, geometry(kind="mla", kv_heads=1, tp=2))
    assert [route.holders for route in wide] == [(0, 1, 2), (0, 1, 2)]
    assert all(route.whole_page for route in wide)
    found = plan.programs(wide, list(range(7)), list(range(10, 17)), sequence=1)
    assert [(p.source_rank, p.destination_rank, p.spans) for p in found] == [
        (1, 0, (PageSpan(0, 10, 3),)),
        (2, 0, (PageSpan(3, 13, 2),)),
        (0, 0, (PageSpan(5, 15, 2),)),
        (2, 1, (PageSpan(0, 10, 3),)),
        (0, 1, (PageSpan(3, 13, 2),)),
        (1, 1, (PageSpan(5, 15, 2),)),
    ]
    assert [p.pages for p in found] == [3, 2, 2, 3, 2, 2]


def test_fewer_pages_than_copies() -> None:
    latent = geometry(kind="mla", kv_heads=1, tp=4)
    found = plan.programs(plan.routes(latent, latent), [7], [9], sequence=0)
    assert [(p.source_rank, p.spans) for p in found] == [
        (rank, (PageSpan(7, 9, 1),)) for rank in range(4)
    ]


def test_no_pages_no_programs_no_units() -> None:
    one = geometry()
    assert plan.programs(plan.routes(one, one), [], [], sequence=0) == ()
    assert plan.expected_units(one, one, 0) == 0
    assert plan.sent_pages(1, 16) == 0


def test_sent_pages_leave_out_the_last_token() -> None:
    assert [plan.sent_pages(n, 16) for n in (1, 2, 16, 17, 18, 33)] == [0, 1, 1, 1, 2, 2]
    assert plan.sent_pages(33, 16, first_page=1) == 1
    assert plan.sent_pages(33, 16, first_page=2) == 0
    with pytest.raises(AssertionError):
        plan.sent_pages(0, 16)


def test_a_chunk_sends_what_it_fills() -> None:
    assert plan.chunk_pages(0, 32, 40, 16) == range(2)
    assert plan.chunk_pages(32, 40, 40, 16) == range(2, 3)
    assert plan.chunk_pages(0, 32, 40, 16, first_page=1) == range(1, 2)
    assert len(plan.chunk_pages(0, 16, 40, 16, first_page=2)) == 0
    for start, end in ((0, 30), (8, 40), (16, 16), (32, 41)):
        with pytest.raises(AssertionError):
            plan.chunk_pages(start, end, 40, 16)


def test_units_count_pages_layers_routes_and_context_pieces() -> None:
    assert plan.expected_units(geometry(tp=4), geometry(tp=2), pages=7) == 7 * 5 * 4
    assert plan.expected_units(geometry(), geometry(), 2, context_bytes=600_000) == 10 + 3
    assert plan.context_pieces(600_000) == [
        (0, 262_144),
        (262_144, 262_144),
        (524_288, 75_712),
    ]


def test_spans_need_neighbours_on_both_sides() -> None:
    assert plan.pair_spans([1, 2, 3, 4], [7, 8, 9, 10]) == (PageSpan(1, 7, 4),)
    assert plan.pair_spans([1, 2, 4, 5], [7, 8, 9, 11]) == (
        PageSpan(1, 7, 2),
        PageSpan(4, 9, 1),
        PageSpan(5, 11, 1),
    )
    assert plan.pair_spans([2, 1], [1, 2]) == (PageSpan(2, 1, 1), PageSpan(1, 2, 1))
    assert plan.pair_spans([5], [6]) == (PageSpan(5, 6, 1),)
    assert plan.pair_spans([], []) == ()
    with pytest.raises(AssertionError):
        plan.pair_spans([1, 2], [1])


def test_differences_name_field_and_both_values() -> None:
    here = geometry(tp=2)
    assert plan.differences(here, geometry(tp=1, pages=9)) == [], "these may differ"
    there = dataclasses.replace(here, page_tokens=32, dtype="bfloat16")
    assert plan.differences(here, there) == [
        "page_tokens: 16 here, 32 there",
        "dtype: float32 here, bfloat16 there",
    ]
    with pytest.raises(AssertionError):
        plan.routes(here, there)
