"""Numbers, meters and escaped text: the letters that everything else is written in."""

import pytest
from pdnode_tui import units
from pdnode_tui.lines import clean, cut, fit, plain, sides, split, to_ascii, width_of
from pdnode_tui.meter import bar, plot, share, spark, stretch
from rich.cells import cell_len

from tests.support.console import HOSTILE


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0.0, "0us"), (0.000412, "412us"), (0.0009996, "1.0ms"), (0.0098, "9.8ms"),
        (0.084, "84ms"), (0.9996, "1.00s"), (1.31, "1.31s"), (12.4, "12s"), (94.0, "94s"),
        (99.6, "1m39s"), (200.0, "3m20s"), (3599.0, "59m59s"), (3600.0, "1h00m"),
        (14_700.0, "4h05m"), (86_400.0, "1d00h"), (273_600.0, "3d04h"), (8.64e6, "100d"),
        (1e12, ">99kd"), (-0.5, "-500ms"),
    ],
)  # fmt: skip
def test_duration(seconds: float | None, text: str) -> None:
    assert units.duration(seconds) == text
    assert len(text) <= 6


@pytest.mark.parametrize(
    ("gbit", "text"),
    [(None, "-"), (0.0, "0"), (0.001, "<.01"), (0.32, "0.32"), (4.13, "4.1"), (41.0, "41"),
     (9.96, "10"), (344.4, "344"), (1e6, ">99k")],
)  # fmt: skip
def test_gbits(gbit: float | None, text: str) -> None:
    assert units.gbits(None if gbit is None else gbit * 1e9 / 8) == text
    assert len(text) <= 5


def test_counts_volumes_shares_and_clocks() -> None:
    assert [units.count(n) for n in (None, 0, 2914, 999_999, 1_234_567, 10**16)] == [
        "-", "0", "2,914", "999,999", "1.2M", ">999T"]  # fmt: skip
    assert [units.volume(n) for n in (None, 0, 999, 512e6, 5.96e9, 2.7e12)] == [
        "-", "0 B", "999 B", "512 MB", "6.0 GB", "2.7 TB"]  # fmt: skip
    assert [units.percent(r) for r in (None, 0, 0.005, 0.994, 0.999, 1.0, 1.5)] == [
        "-", "0%", "0%", "99%", "99%", "100%", "150%"]  # fmt: skip
    assert units.clock(1_790_858_467.0) == "12:41:07"
    assert units.clock(float("inf")) == "??:??:??"


def test_a_meter_is_fixed_on_0_to_the_limit() -> None:
    """What Textual's sparkline gets wrong: a constant full load is full, and a ripple is small."""
    assert spark([50.0] * 4, 50.0, 4) == "████"
    assert spark([49.9, 50.0], 50.0, 2) == "██"
    assert spark([25.0, 50.0], 50.0, 2) == "▄█"
    assert spark([0.0, 0.001, 50.0], 50.0, 5) == "·· ▁█"
    assert spark([1.0], None, 2) == "· "
    assert plot([16.0, 8.0, 1.0], 16.0, 4, 2) == [" █  ", "·██▁"]


def test_a_bar_is_full_only_at_all_and_empty_only_at_nothing() -> None:
    assert [bar(ratio, 4) for ratio in (0.0, 0.001, 0.5, 0.999, 1.0, 7.0)] == [
        "    ", "▏   ", "██  ", "███▉", "████", "████"]  # fmt: skip
    assert [share(v, 10) for v in (None, -1, 0, 5, 20)] == [0.0, 0.0, 0.0, 0.5, 1.0]


def test_a_row_of_a_time_line_shows_waiting_then_work() -> None:
    assert stretch(0.0, 5.0, 10.0, 10.0, 10) == "░░░░░█████"
    assert stretch(2.0, 2.0, 4.0, 10.0, 10) == "  ██      "
    assert stretch(10.0, 10.0, 10.0, 10.0, 4) == "   █"
    assert stretch(1.0, 2.0, 3.0, 0.0, 4) == "    "


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain-1", "plain-1"), ("[bold]x[/]", "[bold]x[/]"), ("\x1b[31mred", "?[31mred"),
        ("a\nb\tc\x00", "a?b?c?"), ("日本", "日本"), ("e\u0301", "é"),
        ("x\u0301\u0301\u0301", "x\u0301\u0301?"), ("\u0301a", "?a"), ("\u202eabc", "?abc"),
        ("👩\u200d👧", "👩?👧"), ("❤\ufe0f", "❤?"), ("\u00a0", " "),
        ("a\u200bb", "a?b"),
    ],
)  # fmt: skip
def test_text_from_outside_is_escaped(raw: str, shown: str) -> None:
    assert clean(raw) == shown


@pytest.mark.parametrize("raw", HOSTILE)
def test_escaped_text_has_the_width_of_its_characters(raw: str) -> None:
    shown = clean(raw, 60)
    assert len(shown) <= 60
    assert cell_len(shown) == sum(cell_len(char) for char in shown)
    assert shown.isprintable()
    for width in range(12):
        assert cell_len(cut(shown, width)) <= width
        assert width_of(fit(((shown, ""), ("x", "")), width)) == width
    assert "".join(split(shown, 7)) == shown


def test_lines_are_cut_and_filled_to_the_cell() -> None:
    line = (("abc", "bold"), ("日本", "dim"))
    assert plain(fit(line, 10)) == "abc日本   "
    assert plain(fit(line, 10, right=True)) == "   abc日本"
    assert plain(fit(line, 7)) == "abc日本"
    assert plain(fit(line, 6)) == "abc日…"
    assert plain(fit(line, 5)) == "abc… "  # a wide character never stands half outside
    assert fit(line, 3) == (("ab…", "bold"),)


def test_what_matters_least_goes_first_where_room_is_short() -> None:
    left = [(0, (("name", ""),)), (2, (("minor", ""),))]
    right = [(1, (("12:00", ""),))]
    assert plain(sides(left, right, 30)) == " name  minor            12:00 "
    assert plain(sides(left, right, 16)) == " name     12:00 "
    assert plain(sides(left, right, 8)) == " name   "


def test_ascii_replaces_glyphs_cell_by_cell() -> None:
    line = to_ascii((("┌─┐│█▌ ▁▅● 日…é", ""),))
    assert plain(line) == "+-+|#= .+* ??~?"
    assert width_of(line) == cell_len("┌─┐│█▌ ▁▅● 日…é")
