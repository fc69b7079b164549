"""What the console's tests share: a source that does as it is told, time that stands still, and
snapshots full of names that try to break the screen."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from pdnode_tui import mock
from pdnode_tui.app import TopApp
from pdnode_tui.lines import plain
from pdnode_tui.source import SourceError
from pdnode_tui.view import View
from textual.pilot import Pilot

from pdnode.obs.snapshot import ActionAnswer, Event, Snapshot, encode

HOSTILE = (
    "[bold red]name[/]", "\x1b[31mred\x1b[0m", "two\nlines\r\ttab", "日本語の名前です",
    "e\u0301\u0301\u0301\u0301", "\u0301lone", "\u202egnp.exe", "👩\u200d👩\u200d👧", "🇩🇪🇩🇪",
    "❤\ufe0f", "a" * 5000, "\uff46" * 40, "\x00\x07\x9b2J", "\ud7b0\u1160", "\u200b\u2060\ufeff",
    "नि्नि", "", "%s {} \\ $(x)", "\U000e0041tag", "│┌█",
)  # fmt: skip
"""Markup, escapes, controls, wide, combining, bidirectional, joined, long and empty names."""


def hostile(kind: str = "degraded") -> Snapshot:
    """A made-up node with every string replaced by a hostile one; ids stay unique."""
    numbers = itertools.count()

    def spoil(value: object) -> object:
        if isinstance(value, str):
            number = next(numbers)
            return f"{HOSTILE[number % len(HOSTILE)]}{number}"
        if isinstance(value, dict):
            return {key: spoil(inner) for key, inner in value.items()}
        return [spoil(inner) for inner in value] if isinstance(value, list) else value

    return msgspec.convert(spoil(msgspec.to_builtins(mock.snapshot(kind))), Snapshot)


@dataclass(slots=True)
class ToldSource:
    """Gives `snapshot`, or fails with `failure`; keeps the actions that were asked for."""

    snapshot: Snapshot
    failure: str = ""
    answer: ActionAnswer | None = None
    name: str = "unix:/run/pdnode/admin.sock"
    can_act: bool = True
    fetches: int = 0
    followed: list[int] = field(default_factory=list)
    acted: list[tuple[str, dict[str, str], str]] = field(default_factory=list)
    events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)

    async def fetch(self) -> bytes:
        self.fetches += 1
        if self.failure:
            raise SourceError(self.failure)
        return encode(self.snapshot)

    async def follow(self, cursor: int) -> AsyncIterator[Event]:
        self.followed.append(cursor)
        while (event := await self.events.get()) is not None:
            yield event

    async def act(self, action: str, body: dict[str, str], *, key: str) -> ActionAnswer:
        self.acted.append((action, body, key))
        if self.answer is None:
            raise SourceError("no answer within 30 s")
        return self.answer

    async def aclose(self) -> None:
        return


@dataclass(slots=True)
class Bench:
    """The application with a source, a clock and pauses that only the test ends."""

    source: ToldSource
    app: TopApp
    now: list[float]
    pauses: list[float]

    @property
    def text(self) -> list[str]:
        """The lines as they are drawn now."""
        size = self.app.size
        return [plain(line) for line in self.app.console_model.picture(size.width, size.height)]

    async def polled(self, pilot: Pilot[None]) -> None:
        """Let the application ask once more, and wait until it has drawn the answer."""
        before = len(self.pauses)
        self.app.poll_now()
        await until(pilot, lambda: len(self.pauses) > before)


def bench(folder: Path, view: View | None = None, kind: str = "healthy") -> Bench:
    source = ToldSource(mock.snapshot(kind))
    now, pauses = [1000.0], []

    async def pause(event: asyncio.Event, most_s: float) -> None:
        pauses.append(most_s)
        await event.wait()

    app = TopApp(
        source, view or View(source=source.name), folder=folder, clock=lambda: now[0], pause=pause
    )
    return Bench(source, app, now, pauses)


async def until(pilot: Pilot[None], condition: Callable[[], bool], most_s: float = 30.0) -> None:
    """Wait for a condition, not for a time; the bound only ends a test that hangs."""

    async def wait() -> None:
        while not condition():
            await pilot.pause()
            await asyncio.sleep(0.005)

    await bounded(wait(), most_s)


async def bounded(work: Awaitable[None], most_s: float) -> None:
    await asyncio.wait_for(asyncio.ensure_future(work), most_s)
