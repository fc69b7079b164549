"""Statistics of a load run, against numbers that can be checked by hand."""

import pytest

from pdnode.bench.figures import (
    Background,
    Quantiles,
    Trace,
    gaps,
    quantiles,
    ratios,
    slowdown,
    split_gaps,
    summarize,
)


def test_quantiles_interpolate_between_ranks() -> None:
    assert quantiles([]) is None
    assert quantiles([3.0]) == Quantiles(3.0, 3.0, 3.0, 3.0)
    assert quantiles([4.0, 2.0]) == Quantiles(3.0, 3.8, 3.98, 4.0)
    found = quantiles(range(101, 0, -1))
    assert found == Quantiles(51.0, 91.0, 100.0, 101.0)


def test_a_summary_leaves_failed_requests_out_of_latencies() -> None:
    traces = [
        Trace(10.0, (10.5, 10.6, 10.9), 11.0),
        Trace(20.0, (21.5,), 21.5),
        Trace(30.0, (30.1, 30.2), 99.0, "timeout"),
        Trace(31.0, (), 31.0, "http_429"),
        Trace(32.0, (), 32.0, "http_429"),
    ]
    found = summarize(traces, url="http://x", model="m", active_s=8.0)
    assert (found.requests, found.completed) == (5, 2)
    assert found.errors == {"timeout": 1, "http_429": 2}
    assert found.requests_per_s == 0.25
    assert found.output_tokens_per_s == 0.5
    assert found.ttft_s is not None
    assert (found.ttft_s.p50, found.ttft_s.max) == (1.0, 1.5)
    assert found.itl_s is not None
    assert (found.itl_s.p50, found.itl_s.max) == (pytest.approx(0.2), pytest.approx(0.3))
    assert found.tpot_s is not None  # of the first only: the second has one token
    assert found.tpot_s.p50 == pytest.approx(0.2)
    assert found.e2e_s is not None
    assert (found.e2e_s.p50, found.e2e_s.max) == (1.25, 1.5)


def test_nothing_completed_gives_no_latencies() -> None:
    found = summarize([Trace(0.0, (), 1.0, "timeout")], url="u", model="m", active_s=0.0)
    assert (found.ttft_s, found.itl_s, found.tpot_s, found.e2e_s) == (None,) * 4
    assert (found.requests_per_s, found.output_tokens_per_s) == (0.0, 0.0)


def test_gaps_are_sorted_by_what_the_load_did() -> None:
    found = gaps((0.0, 1.0, 2.5, 4.0, 5.0, 6.0, 9.0, 10.0, 12.0))
    prompts = [(8.0, 8.5), (4.5, 5.5), (4.2, 4.6), (11.0, 13.0)]
    quiet, loaded = split_gaps(found, idle=(1.0, 4.0), prompts=prompts)
    assert quiet == [1.5, 1.5]  # 0..1 began before the window
    # 4..5 and 5..6 touch the joined 4.2..5.5, 6..9 holds 8..8.5, 10..12 the beginning of the last
    assert loaded == [1.0, 1.0, 3.0, 2.0]
    assert split_gaps(found, idle=(0.0, 0.0), prompts=[]) == ([], [])
    # a gap that ends as a prompt begins, or begins as it ends, has nothing of it
    assert split_gaps([(1.0, 2.0), (3.0, 4.0)], idle=(0.0, 0.0), prompts=[(2.0, 3.0)])[1] == []


def test_ratios_are_second_over_first() -> None:
    slow = summarize([Trace(0.0, (2.0, 3.0), 3.0)], url="a", model="m", active_s=4.0)
    fast = summarize([Trace(0.0, (1.0, 1.25), 1.5)], url="b", model="m", active_s=2.0)
    assert ratios(slow, fast) == {
        "ttft_s": 0.5, "itl_s": 0.25, "tpot_s": 0.25, "e2e_s": 0.5, "output_tokens_per_s": 2.0,
    }  # fmt: skip
    none = summarize([], url="c", model="m", active_s=1.0)
    assert ratios(slow, none) == {"output_tokens_per_s": 0.0}
    assert ratios(none, slow) == {}


def test_slowdown_is_of_the_p99() -> None:
    idle, loaded = Quantiles(1.0, 1.0, 2.0, 9.0), Quantiles(1.0, 1.0, 5.0, 9.0)
    assert slowdown(Background(1, 9, idle, 9, loaded)) == 2.5
    assert slowdown(Background(1, 9, idle, 0, None)) is None
