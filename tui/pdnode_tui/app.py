"""The Textual application: a terminal around `Console`. It polls, draws lines, passes keys on."""

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.strip import Strip
from textual.widget import Widget

from pdnode.obs.snapshot import ActionAnswer
from pdnode_tui.console import Act, Command, Console, Poll, Quit, Record
from pdnode_tui.lines import PLAIN_STYLES, STYLES, Line
from pdnode_tui.source import Recorder, Source, SourceEnded, SourceError, read_snapshot
from pdnode_tui.view import View

REDRAW_S = 1.0
"""The stale counter moves this often; all else is drawn when it changes."""


async def _pause(event: asyncio.Event, most_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), most_s)


class Picture(Widget):
    """The lines of the console, one strip each; no markup is ever parsed."""

    DEFAULT_CSS = "Picture { width: 100%; height: 100%; }"

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._model = console
        self._lines: list[Line] = []
        names = PLAIN_STYLES if os.environ.get("NO_COLOR") else STYLES
        self._parsed = {name: Style.parse(style) for name, style in names.items()}

    def redraw(self) -> None:
        self._lines = self._model.picture(self.size.width, self.size.height)
        self.refresh()

    def on_resize(self) -> None:
        self.redraw()

    def render_line(self, y: int) -> Strip:
        if y >= len(self._lines):
            # With a style: the filter of NO_COLOR takes no segment without one.
            return Strip.blank(self.size.width, self._parsed[""])
        return Strip([Segment(text, self._parsed[style]) for text, style in self._lines[y]])


class TopApp(App[None]):
    """`folder` is where recordings go. `pause` waits for an event, but not longer than so many
    seconds; tests bring a clock and a pause of their own."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { overflow: hidden; }"
    TITLE = "pdnode top"

    def __init__(
        self,
        source: Source,
        view: View,
        *,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[asyncio.Event, float], Awaitable[None]] = _pause,
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self.console_model = Console(view, clock)
        self._source = source
        self._folder = folder
        self._clock = clock
        self._pause = pause
        self._picture = Picture(self.console_model)
        self._recorder: Recorder | None = None
        self._wake = asyncio.Event()  # poll now
        self._answering = asyncio.Event()  # the last poll got an answer
        self._tasks: set[asyncio.Task[None]] = set()

    def compose(self) -> ComposeResult:
        yield self._picture

    def on_mount(self) -> None:
        self._spawn(self._poll())
        self._spawn(self._follow())
        self.set_interval(REDRAW_S, self._redraw_if_stale)

    async def on_unmount(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._recorder is not None:
            self._recorder.close()
        await self._source.aclose()

    # snapshots and events

    def poll_now(self) -> None:
        """Ask for a snapshot without waiting for the interval."""
        self._wake.set()

    async def _poll(self) -> None:
        while True:
            try:
                wait_s = await self._poll_once()
            except SourceEnded as ended:
                self.console_model.ended(str(ended))
                self._picture.redraw()
                return
            self._wake.clear()
            await self._pause(self._wake, wait_s)

    async def _poll_once(self) -> float:
        """Ask once; how long to wait before the next time."""
        try:
            data = await self._source.fetch()
            snapshot = read_snapshot(data)
        except SourceError as error:
            self._answering.clear()
            wait_s = self.console_model.failed(str(error))
        else:
            self._write(data)
            self.console_model.received(snapshot)
            self._answering.set()
            wait_s = self.console_model.view.interval_s
        self._picture.redraw()
        return wait_s

    async def _follow(self) -> None:
        """Events as they happen. After a loss it waits until a snapshot has told the boot."""
        while True:
            await self._answering.wait()
            try:
                async for event in self._source.follow(self.console_model.cursor):
                    self.console_model.events((event,))
                    self._picture.redraw()
            except SourceError:
                pass  # the poll says what is wrong
            await asyncio.sleep(REDRAW_S)

    def _redraw_if_stale(self) -> None:
        if self.console_model.view.stale is not None:
            self._picture.redraw()

    # keys and commands

    async def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        printable = event.character if event.is_printable else None
        command = self.console_model.key(printable or event.key)
        if command is not None:
            self._carry_out(command)
        self._picture.redraw()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Quit():
                self.exit()
            case Poll():
                self.poll_now()
            case Record():
                self._toggle_recording()
            case Act():
                self._spawn(self._act(command))

    async def _act(self, command: Act) -> None:
        # A key of its own for each confirmation: a repeat on the wire is not a second action.
        key = secrets.token_hex(8)
        try:
            answer = await self._source.act(command.action, command.body, key=key)
        except SourceError as error:
            answer = ActionAnswer(done=False, text=str(error))
        self.console_model.answered(answer)
        self.poll_now()
        self._picture.redraw()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """A task that failed is a fault of this program: end with its trace, not a dead screen."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._handle_exception(error if isinstance(error, Exception) else Exception(error))

    # recording

    def _toggle_recording(self) -> None:
        console = self.console_model
        if self._recorder is not None:
            self._recorder.close()
            path, self._recorder = self._recorder.path, None
            console.recording(None, f"recorded to {path}")
            return
        node = "" if console.snapshot is None else console.snapshot.node.id
        safe = re.sub(r"[^A-Za-z0-9.-]", "_", node)[:40] or "node"
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        path = self._folder / f"pdnode-{safe}-{stamp}.jsonl"
        try:
            self._recorder = Recorder(path, self._clock())
        except OSError as error:
            console.recording(None, f"cannot record: {error.strerror}: {path}", bad=True)
        else:
            console.recording(path.name, f"recording to {path}")

    def _write(self, data: bytes) -> None:
        if self._recorder is None:
            return
        try:
            if self._recorder.write(data, self._clock()):
                return
            text = f"{self._recorder.path} is full"
        except OSError as error:
            text = f"{self._recorder.path}: {error.strerror}"
        self._recorder.close()
        self._recorder = None
        self.console_model.recording(None, text, bad=True)
