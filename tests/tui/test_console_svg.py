"""Whole screens as Textual exports them: colours and glyphs, not only letters.

After a wanted change or another version of Textual: pytest tests/tui/test_console_svg.py
--snapshot-update, then look at the pictures in __snapshots__.
"""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from pdnode_tui.view import View
from textual.pilot import Pilot

from tests.support.console import Bench, bench, until

SIZES = ((80, 24), (100, 30), (160, 50))
KINDS = ("healthy", "degraded", "stale", "empty")
Compare = Callable[..., bool]


def settled(parts: Bench, *, stale: bool) -> Callable[[Pilot[None]], object]:
    """Wait until the first picture is there; then, if wanted, lose the daemon for 12 s."""

    async def before(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: bool(parts.pauses))
        if stale:
            parts.source.failure = "Connection refused"
            await parts.polled(pilot)
            parts.now[0] += 12.0
            parts.app.query_one("Picture").redraw()  # type: ignore[attr-defined]
            await pilot.pause()

    return before


def made(folder: Path, kind: str) -> Bench:
    return bench(folder, kind="healthy" if kind == "stale" else kind)


@pytest.mark.parametrize(("size", "kind"), list(product(SIZES, KINDS)),
                         ids=[f"{w}x{h}-{k}" for (w, h), k in product(SIZES, KINDS)])  # fmt: skip
def test_flow(snap_compare: Compare, tmp_path: Path, size: tuple[int, int], kind: str) -> None:
    parts = made(tmp_path, kind)
    before = settled(parts, stale=kind == "stale")
    assert snap_compare(parts.app, terminal_size=size, run_before=before)


def test_no_color(snap_compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    parts = made(tmp_path, "degraded")
    before = settled(parts, stale=False)
    assert snap_compare(parts.app, terminal_size=(100, 30), run_before=before)


async def test_no_color_leaves_no_colour_and_nothing_dark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the baseline says: all text is grey, and bright but in the chosen row."""
    monkeypatch.setenv("NO_COLOR", "1")
    parts = bench(tmp_path, View(), "degraded")
    async with parts.app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        svg = parts.app.export_screenshot()
    styles = re.findall(r"\.terminal-[^ ]*r\d+ { fill: #([0-9a-f]{6})", svg)
    channels = [[int(colour[at : at + 2], 16) for at in (0, 2, 4)] for colour in styles]
    assert len(channels) >= 4
    assert all(max(rgb) - min(rgb) <= 4 for rgb in channels)
    assert sum(max(rgb) < 0x80 for rgb in channels) <= 1
