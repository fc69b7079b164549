"""Quantiles, sums and rates of the last minute, against plain lists."""

import random

import pytest

from pdnode.obs.windows import WINDOW_S, Rates, WindowQuantiles, WindowSums


def test_quantiles_are_those_of_the_last_minute() -> None:
    draw = random.Random(7)
    window = WindowQuantiles()
    kept: list[tuple[float, float]] = []
    now = 1000.0
    for _ in range(4000):
        now += draw.expovariate(20)
        value_s = draw.lognormvariate(-3, 1.5)
        window.add(value_s, now=now)
        kept.append((now, value_s))
    recent = sorted(value for at, value in kept if int(at) > now - WINDOW_S)
    assert len(recent) < len(kept)
    assert window.count(now) == len(recent)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = recent[max(0, -(-int(share * 1000) * len(recent) // 1000) - 1)]
        assert window.quantile_s(share, now) == pytest.approx(exact, rel=0.03)


def test_an_empty_window_has_no_quantile() -> None:
    window = WindowQuantiles()
    assert window.quantile_s(0.5, 10.0) is None
    window.add(0.25, now=10.0)
    assert window.quantile_s(0.5, 10.0) == pytest.approx(0.25, rel=0.03)
    assert window.count(10.0 + WINDOW_S + 1) == 0
    assert window.quantile_s(0.5, 10.0 + WINDOW_S + 1) is None


def test_durations_out_of_range_are_kept_at_its_ends() -> None:
    window = WindowQuantiles()
    window.add(-0.001, now=1.0)  # clocks of two nodes: a wait may be a little below 0
    assert window.quantile_s(1.0, 1.0) == 0.0
    window.add(1e9, now=1.0)
    assert window.quantile_s(1.0, 1.0) == pytest.approx(1e4, rel=0.06)


def test_sums_forget() -> None:
    sums = WindowSums()
    sums.add("done", now=5.2)
    sums.add("done", 4, now=30.0)
    sums.add("failed", now=30.5)
    assert [sums.get(name, 31.0) for name in ("done", "failed", "none")] == [5, 1, 0]
    assert sums.get("done", 5.2 + WINDOW_S + 1) == 4
    assert sums.get("done", 30.0 + WINDOW_S + 1) == 0


def test_rates_of_a_counter() -> None:
    rates = Rates()
    assert rates.now is None
    assert rates.mean is None
    rates.sample(100, now=0.0)
    rates.sample(300, now=1.0)
    rates.sample(400, now=3.0)
    assert list(rates.history) == [200, 50]
    assert (rates.now, rates.peak, rates.mean) == (50.0, 200.0, 125.0)
    rates.sample(7, now=4.0)  # it began anew: nothing can be said of this second
    assert rates.now == 50.0
    rates.sample(10, now=5.0)
    assert rates.now == 3.0
    for second in range(6, 6 + 2 * WINDOW_S):
        rates.sample(10, now=float(second))
    assert len(rates.history) == WINDOW_S
    assert rates.peak == 200.0
