"""The console against the daemon's own admin routes over a unix socket, and without a daemon."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from pdnode_tui import mock
from pdnode_tui.app import TopApp
from pdnode_tui.lines import plain
from pdnode_tui.source import (
    MAX_BYTES,
    MockSource,
    Recorder,
    ReplaySource,
    SocketSource,
    SourceEnded,
    SourceError,
    read_snapshot,
)
from pdnode_tui.view import View

from pdnode.api.admin import SettingValue, build_admin_app, listen_admin
from pdnode.api.admin_actions import Action, ActionRefused, Cancel, Drain
from pdnode.obs.events import EventRing
from pdnode.obs.log import event
from pdnode.obs.records import Records
from pdnode.obs.snapshot import encode
from tests.support.console import until


class Daemon:
    """Shows a made-up snapshot and remembers what it was told."""

    def __init__(self, boot: str = "b1") -> None:
        self.boot = boot
        self.told: list[Action] = []
        self.ring = EventRing()

    async def act(self, action: Action) -> str:
        self.told.append(action)
        if action == Cancel(request_id="gone"):
            raise ActionRefused(404, "no such request")
        return "as you say"

    def snapshot(self) -> bytes:
        made = mock.snapshot("healthy")
        node = msgspec.structs.replace(made.node, boot=self.boot)
        return encode(msgspec.structs.replace(made, node=node, events=self.ring.last(32)))

    def settings(self) -> list[SettingValue]:
        return []

    def log_level(self) -> str:
        return "info"

    def happen(self, text: str) -> None:
        log = logging.getLogger("tests.console")
        log.propagate = False
        log.setLevel(logging.INFO)
        log.handlers = [self.ring]
        event(log, logging.WARNING, "peer.lost", text)


@contextlib.asynccontextmanager
async def serving(daemon: Daemon, path: Path) -> AsyncIterator[None]:
    runner = await listen_admin(build_admin_app(daemon, Records(), daemon.ring), path)
    try:
        yield
    finally:
        await runner.cleanup()


async def test_snapshot_actions_and_events_of_a_daemon(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    daemon, source = Daemon(), SocketSource(path)
    daemon.happen("first")
    async with serving(daemon, path), contextlib.aclosing(source):
        assert await source.fetch() == daemon.snapshot()
        said = await source.act("drain", {}, key="k1")
        assert (said.done, said.text) == (True, "as you say")
        again = await source.act("drain", {}, key="k1")
        assert again == said
        assert daemon.told == [Drain()]  # the same key is the same action
        gone = await source.act("cancel", {"request_id": "gone"}, key="k2")
        assert (gone.done, gone.text) == (False, "no such request")
        found = []
        async with asyncio.timeout(30):
            async for one in source.follow(0):
                found.append(one.text)
                if len(found) == 1:
                    daemon.happen("second")
                else:
                    break
        assert found == ["first", "second"]


async def test_no_daemon_is_said_in_words(tmp_path: Path) -> None:
    source = SocketSource(tmp_path / "missing.sock")
    async with contextlib.aclosing(source):
        with pytest.raises(SourceError, match="No such file or directory"):
            await source.fetch()
        with pytest.raises(SourceError, match="No such file or directory"):
            await source.act("drain", {}, key="k")
        with pytest.raises(SourceError, match="No such file or directory"):
            await anext(source.follow(0))


async def test_answers_that_are_no_snapshots(tmp_path: Path) -> None:
    """Another program behind the socket: an error page, nonsense, and an answer without end."""
    path = tmp_path / "other.sock"
    answers = iter(
        [
            web.Response(status=404),
            web.Response(body=b"{}"),
            web.Response(body=b"x" * (MAX_BYTES + 1)),
        ]
    )

    async def answer(_request: web.Request) -> web.Response:
        return next(answers)

    app = web.Application()
    app.router.add_get("/admin/v1/snapshot", answer)
    runner = await listen_admin(app, path)
    source = SocketSource(path)
    try:
        with pytest.raises(SourceError, match="HTTP 404"):
            await source.fetch()
        with pytest.raises(SourceError, match="not a snapshot"):
            read_snapshot(await source.fetch())
        with pytest.raises(SourceError, match="longer than"):
            await source.fetch()
    finally:
        await source.aclose()
        await runner.cleanup()


async def test_a_daemon_that_hangs_is_stale_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "hangs.sock"
    server = await asyncio.start_unix_server(lambda _reader, _writer: asyncio.sleep(60), str(path))
    source = SocketSource(path)
    try:
        with pytest.raises(SourceError, match=r"no answer within 1\.5 s"):
            await source.fetch()
    finally:
        await source.aclose()
        server.close()


async def test_the_console_survives_the_end_of_its_daemon_and_finds_the_next(
    tmp_path: Path,
) -> None:
    path = tmp_path / "admin.sock"
    first, second = Daemon("b1" * 16), Daemon("b2" * 16)
    app = TopApp(SocketSource(path), View(interval_s=0.2), folder=tmp_path)
    model = app.console_model

    def top() -> str:
        return plain(model.picture(100, 30)[0])

    async with app.run_test(size=(100, 30)) as pilot:
        async with serving(first, path):
            await until(pilot, lambda: "serving" in top())
            first.happen("news [1]")
            await until(pilot, lambda: any(e.text == "news [1]" for e in model.view.events))
        await until(pilot, lambda: "STALE" in top())
        assert model.snapshot is not None
        async with serving(second, path):
            await until(pilot, lambda: "STALE" not in top())
            assert "new boot b2b2b2b2" in model.view.result
            second.happen("news [2]")
            await until(pilot, lambda: [e.text for e in model.view.events] == ["news [2]"])
            await pilot.press("X", "y")
            await until(pilot, lambda: bool(second.told))
            assert second.told == [Cancel(request_id="03de88a1")]
            await until(pilot, lambda: model.view.result == "as you say")
            await pilot.press("q")


async def test_mock_and_replay_sources(tmp_path: Path) -> None:
    stale = MockSource("stale")
    assert read_snapshot(await stale.fetch()) == mock.snapshot("healthy")
    with pytest.raises(SourceError, match="Connection refused"):
        await stale.fetch()

    file = tmp_path / "r.jsonl"
    recorder = Recorder(file, 10.0)
    assert recorder.write(encode(mock.snapshot("degraded")), 12.5)
    recorder.close()
    with pytest.raises(FileExistsError):
        Recorder(file, 0.0)
    with file.open("ab") as sink:
        sink.write(b"rubbish\n")
    replay = ReplaySource(file)
    assert read_snapshot(await replay.fetch()) == mock.snapshot("degraded")
    with pytest.raises(SourceEnded, match="line 2 of the recording"):
        await replay.fetch()
    with pytest.raises(SourceEnded, match="end of the recording after 2"):
        await replay.fetch()
    with pytest.raises(SourceError, match="cannot be told"):
        await replay.act("drain", {}, key="k")
    await replay.aclose()


async def test_a_recording_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdnode_tui.source.MAX_RECORDING_BYTES", 100_000)
    recorder = Recorder(tmp_path / "r.jsonl", 0.0)
    data = encode(mock.snapshot("degraded"))
    assert [recorder.write(data, 1.0) for _ in range(5)] == [True, True, True, False, False]
    recorder.close()
    assert (tmp_path / "r.jsonl").stat().st_size < 100_000
