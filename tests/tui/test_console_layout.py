"""Every picture has as many lines as the terminal, and every line exactly its width in cells."""

import random
from itertools import product

import pytest
from pdnode_tui import mock
from pdnode_tui.lines import plain, width_of
from pdnode_tui.render import draw
from pdnode_tui.view import SCREENS, Prompt, Stale, View

from pdnode.obs.snapshot import Snapshot
from tests.support.console import hostile

SIZES = list(product(range(60, 201), range(15, 61)))
ALL_SCREENS = (*SCREENS, "detail", "help")
NODES: dict[str, Snapshot | None] = {
    "healthy": mock.snapshot("healthy", 3),
    "degraded": mock.snapshot("degraded"),
    "empty": mock.snapshot("empty"),
    "hostile": hostile(),
    "nothing": None,
}
SLOW = "c04411ef"  # the request with recorded layers


def check(snapshot: Snapshot | None, view: View, width: int, height: int) -> None:
    lines = draw(snapshot, view, width=width, height=height)
    wrong = [
        (row, width_of(line), plain(line)) for row, line in enumerate(lines)
        if width_of(line) != width or not plain(line).isprintable()
    ]  # fmt: skip
    assert (len(lines), wrong) == (height, []), f"{view.screen} at {width}x{height}"


@pytest.mark.parametrize("part", range(6))  # small steps, for a machine that is busy
def test_flow_at_every_size(part: int) -> None:
    view, snapshot = View(source="unix:/run/pdnode/admin.sock"), NODES["degraded"]
    for width, height in SIZES[part::6]:
        check(snapshot, view, width, height)


@pytest.mark.parametrize("screen", ALL_SCREENS)
def test_the_other_screens_at_sampled_sizes(screen: str) -> None:
    """Each size with another node and another state of the console; the seed is fixed."""
    rng = random.Random(screen)
    views = [
        View(screen=screen, request=SLOW),
        View(screen=screen, request=SLOW, stale=Stale(12.0, 4.0, 3, "Connection refused")),
        View(screen=screen, request=SLOW, ascii=True, paused=True, recording="x.jsonl", find="p"),
        View(screen=screen, request="[x]\n", prompt=Prompt("drain", "drain 日本?", "日" * 80)),
        View(screen=screen, result="\x1b[2J" * 99, result_bad=True, readonly=True, selected="7"),
        View(screen=screen, prompt=Prompt("cancel", "cancel " + "x" * 300), peaks={}),
    ]
    for width, height in rng.sample(SIZES, 300):
        check(rng.choice(list(NODES.values())), rng.choice(views), width, height)


@pytest.mark.parametrize("screen", ALL_SCREENS)
def test_names_from_outside_neither_break_nor_style_a_screen(screen: str) -> None:
    snapshot = hostile()
    request = snapshot.last_slow.request_id if snapshot.last_slow else ""
    for width, height in ((60, 15), (80, 24), (100, 30), (200, 60)):
        check(snapshot, View(screen=screen, request=request), width, height)
    shown = "".join(plain(line) for line in draw(
        snapshot, View(screen=screen, request=request), width=200, height=60))  # fmt: skip
    assert not set(shown) & {"\x1b", "\n", "\r", "\t", "\x9b", "\u202e", "\u200d", "\u0301"}


@pytest.mark.parametrize(("width", "height"), [(59, 15), (60, 14), (20, 5), (3, 1), (1, 1), (0, 0)])
def test_below_the_minimum_it_says_so(width: int, height: int) -> None:
    lines = draw(NODES["healthy"], View(), width=width, height=height)
    assert [width_of(line) for line in lines] == [width] * height
    if width >= 25:
        assert plain(lines[0]).rstrip() == f"needs 60x15, has {width}x{height}"


def test_ascii_pictures_are_ascii() -> None:
    for screen, snapshot in product(ALL_SCREENS, NODES.values()):
        view = View(screen=screen, request=SLOW, ascii=True)
        for line in draw(snapshot, view, width=100, height=30):
            assert plain(line).isascii()
