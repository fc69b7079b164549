"""The application in a terminal of Textual's: keys arrive, the picture follows."""

import re
from pathlib import Path

import msgspec
import pytest
from pdnode_tui import mock
from pdnode_tui.app import Picture, TopApp
from pdnode_tui.source import ReplaySource
from pdnode_tui.view import SCREENS, View

from pdnode.obs.snapshot import ActionAnswer, Event
from tests.support.console import ToldSource, bench, hostile, until

SIZE = (100, 30)


def screen_text(app: TopApp) -> list[str]:
    """What Textual has on its screen."""
    picture = app.query_one(Picture)
    return ["".join(segment.text for segment in picture.render_line(y)) for y in range(30)]


async def test_every_key_arrives(tmp_path: Path) -> None:
    parts = bench(tmp_path)
    async with parts.app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        model = parts.app.console_model
        for number, screen in enumerate(SCREENS, start=1):
            await pilot.press(str(number))
            assert model.view.screen == screen
        await pilot.press("1", "down", "j", "k", "up", "pagedown", "pageup", "end", "home", "down")
        assert model.view.selected == "e5b2006f"
        await pilot.press("enter")
        assert (model.view.screen, model.view.request) == ("detail", "e5b2006f")
        assert "REQUEST e5b2006f" in screen_text(parts.app)[3]
        await pilot.press("escape", "question_mark")
        assert model.view.screen == "help"
        await pilot.press("question_mark", "s")
        assert (model.view.screen, model.view.sort) == ("flow", "rate")
        await pilot.press("slash", "p", "f", "enter")
        assert model.view.find == "pf"
        await pilot.press("escape", "p")
        assert model.view.paused
        await pilot.press("p", "z")
        assert model.view.peaks is not None
        await pilot.press("less_than_sign")
        assert model.view.interval_s == 2.0
        await pilot.press("greater_than_sign", "greater_than_sign")
        assert model.view.interval_s == 0.5
        await pilot.press("q")
    assert parts.app.return_code == 0


async def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    parts = bench(tmp_path)
    async with parts.app.run_test(size=SIZE) as pilot:
        await pilot.press("ctrl+c")
    assert not parts.app.is_running


async def test_a_new_snapshot_is_drawn_and_the_interval_kept(tmp_path: Path) -> None:
    parts = bench(tmp_path)
    async with parts.app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        assert "12:41:07Z" in screen_text(parts.app)[0]
        parts.source.snapshot = mock.snapshot("degraded", 3)
        await parts.polled(pilot)
        assert "12:41:10Z" in screen_text(parts.app)[0]
        assert "W202" in screen_text(parts.app)[2]
        await pilot.press("less_than_sign")
        await until(pilot, lambda: parts.pauses[-1] == 2.0)
        assert parts.pauses[:2] == [1.0, 1.0]


async def test_cancel_is_confirmed_sent_once_and_its_answer_shown(tmp_path: Path) -> None:
    parts = bench(tmp_path)
    parts.source.answer = ActionAnswer(done=True, text="e5b2006f is being cancelled")
    async with parts.app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        await pilot.press("down", "X")
        assert "cancel request e5b2006f?" in screen_text(parts.app)[28]
        await pilot.press("n")
        assert parts.source.acted == []
        await pilot.press("X", "y")
        await until(pilot, lambda: "is being cancelled" in screen_text(parts.app)[29])
        [(action, body, first)] = parts.source.acted
        assert (action, body) == ("cancel", {"request_id": "e5b2006f"})
        await pilot.press("X", "y")
        await until(pilot, lambda: len(parts.source.acted) == 2)
        assert parts.source.acted[1][2] != first  # asked for twice, so done twice


async def test_drain_by_the_name_of_the_node_and_a_refusal(tmp_path: Path) -> None:
    parts = bench(tmp_path)
    parts.source.answer = ActionAnswer(done=False, text="draining already")
    async with parts.app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        await pilot.press("D", *"node-a18", "enter")
        assert parts.source.acted == []
        await pilot.press("D", *"node-a17", "enter")
        await until(pilot, lambda: "draining already" in screen_text(parts.app)[29])
        assert parts.source.acted[0][:2] == ("drain", {})
        parts.source.answer = None
        await pilot.press("D", *"node-a17", "enter")
        await until(pilot, lambda: "no answer within 30 s" in screen_text(parts.app)[29])


async def test_read_only_offers_nothing(tmp_path: Path) -> None:
    parts = bench(tmp_path, View(readonly=True))
    async with parts.app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        assert "drain" not in screen_text(parts.app)[29]
        await pilot.press("X", "y", "D", *"node-a17", "enter")
        assert parts.source.acted == []


async def test_stale_backs_off_and_recovers_by_itself(tmp_path: Path) -> None:
    parts = bench(tmp_path)
    async with parts.app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        parts.source.failure = "Connection refused"
        for _ in range(6):
            await parts.polled(pilot)
        assert parts.pauses == [1.0, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
        parts.now[0] += 20
        await until(pilot, lambda: "STALE 20s" in screen_text(parts.app)[0])
        assert "03de88a1" in "".join(screen_text(parts.app))  # the last picture stays
        await pilot.press("X", "y")
        assert parts.source.acted == []

        parts.source.failure = ""
        again = mock.snapshot("healthy", 30)
        node = msgspec.structs.replace(again.node, boot="b007" * 8)
        parts.source.snapshot = msgspec.structs.replace(again, node=node)
        await parts.polled(pilot)
        assert "STALE" not in screen_text(parts.app)[0]
        assert "restarted: new boot b007b007" in screen_text(parts.app)[29]
        assert parts.pauses[-1] == 1.0


async def test_events_arrive_between_snapshots(tmp_path: Path) -> None:
    parts = bench(tmp_path)
    async with parts.app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(parts.source.followed))
        assert parts.source.followed == [2]  # after the youngest of the snapshot
        event = Event(cursor=3, time_s=0.0, severity="error", code="peer.lost", text="[b]gone[/b]")
        parts.source.events.put_nowait(event)
        await until(pilot, lambda: "peer.lost [b]gone[/b]" in screen_text(parts.app)[26])
        assert parts.source.fetches == 1


async def test_resizing_draws_anew(tmp_path: Path) -> None:
    parts = bench(tmp_path)
    async with parts.app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        await pilot.resize_terminal(59, 20)
        await until(pilot, lambda: "needs 60x15, has 59x20" in screen_text(parts.app)[0])
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "node-a17" in screen_text(parts.app)[0])


async def test_hostile_names_reach_the_terminal_as_text(tmp_path: Path) -> None:
    parts = bench(tmp_path)
    parts.source.snapshot = hostile()
    async with parts.app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        for key in ("1", "2", "3", "4", "enter", "5", "6"):
            await pilot.press(key)
            text = "".join(screen_text(parts.app))
            assert "\x1b" not in text
            assert "\n" not in text
        assert "[bold red]name[/]" in text  # shown, not obeyed


async def test_a_recording_can_be_replayed(tmp_path: Path) -> None:
    parts = bench(tmp_path)
    parts.source.snapshot = msgspec.structs.replace(
        mock.snapshot("healthy"), node=msgspec.structs.replace(
            mock.snapshot("healthy").node, id="../[x]"))  # fmt: skip
    async with parts.app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        await pilot.press("r")
        for tick in range(3):
            parts.now[0] += 1.5
            parts.source.snapshot = mock.snapshot("degraded", tick)
            await parts.polled(pilot)
        assert "REC" in screen_text(parts.app)[0]
        await pilot.press("r")
        assert "recorded to" in screen_text(parts.app)[29]
    [file] = tmp_path.iterdir()
    assert re.fullmatch(r"pdnode-\.\.__x_-\d{8}T\d{6}\.jsonl", file.name)
    lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    assert [line["at_s"] for line in lines] == [1.5, 3.0, 4.5]

    replay = TopApp(ReplaySource(file), View(), folder=tmp_path, pause=_at_once)
    async with replay.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "end of the recording after 3" in screen_text(replay)[29])
        assert replay.console_model.snapshot == mock.snapshot("degraded", 2)


async def _at_once(_event: object, _most_s: float) -> None:
    return


async def test_a_recording_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    parts = bench(tmp_path / "missing")
    async with parts.app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(parts.pauses))
        await pilot.press("r")
        assert "No such file or directory" in screen_text(parts.app)[29]
        assert parts.app.console_model.view.recording is None


async def test_a_fault_of_the_console_ends_it_with_its_trace(tmp_path: Path) -> None:
    class Broken(ToldSource):
        async def fetch(self) -> bytes:
            raise ZeroDivisionError("a bug")

    app = TopApp(Broken(mock.snapshot("healthy")), View(), folder=tmp_path)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: app.return_code == 1)
