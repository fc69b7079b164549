"""`pdnode top`: which source, and whether there is a terminal to draw on."""

import asyncio
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pdnode_tui.console import Console
from pdnode_tui.lines import plain
from pdnode_tui.render import MIN_HEIGHT, MIN_WIDTH
from pdnode_tui.source import (
    MockSource,
    ReplaySource,
    SocketSource,
    Source,
    SourceEnded,
    SourceError,
    read_snapshot,
)
from pdnode_tui.view import View

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 10.0
EXIT_UNAVAILABLE = 69
_PAPER = (100, 30)  # where there is no terminal


@dataclass(frozen=True, slots=True)
class Options:
    socket: Path
    interval_s: float = 1.0
    readonly: bool = False
    once: bool = False
    as_json: bool = False
    ascii: bool = False
    mock: str | None = None
    replay: Path | None = None


def run(options: Options) -> int:
    """Show the node until the operator leaves; the exit code (69: not reachable, only for one
    picture). ValueError where an option is wrong, with its name and what is allowed.
    """
    if not MIN_INTERVAL_S <= options.interval_s <= MAX_INTERVAL_S:
        raise ValueError(f"--interval: {options.interval_s:g}: {MIN_INTERVAL_S} to 10 seconds")
    if options.mock is not None and options.replay is not None:
        raise ValueError("--mock, --replay: only one of them")
    source = _source(options)
    view = View(
        interval_s=options.interval_s,
        readonly=options.readonly or not source.can_act,
        ascii=options.ascii or not _speaks_unicode(),
        source=source.name,
    )
    if options.once or options.as_json or not _is_terminal():
        return asyncio.run(_once(source, view, as_json=options.as_json))
    # Imported here: one picture does not need it, and it takes a third of a second.
    from pdnode_tui.app import TopApp

    TopApp(source, view, folder=Path.cwd()).run()
    return 0


def _source(options: Options) -> Source:
    if options.mock is not None:
        return MockSource(options.mock)
    if options.replay is None:
        return SocketSource(options.socket)
    try:
        return ReplaySource(options.replay)
    except OSError as error:
        raise ValueError(f"--replay: {options.replay}: {error.strerror}") from error


def _is_terminal() -> bool:
    term = os.environ.get("TERM", "")
    return sys.stdin.isatty() and sys.stdout.isatty() and term not in ("", "dumb")


def _speaks_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


async def _once(source: Source, view: View, *, as_json: bool) -> int:
    try:
        data = await source.fetch()
        snapshot = read_snapshot(data)
    except (SourceError, SourceEnded) as error:
        sys.stderr.write(f"{source.name}: {error}\n")
        return EXIT_UNAVAILABLE
    finally:
        await source.aclose()
    if as_json:
        return _write(data.decode() + "\n")
    console = Console(view, time.monotonic)
    console.received(snapshot)
    width, height = shutil.get_terminal_size(_PAPER)
    lines = console.picture(max(MIN_WIDTH, width), max(MIN_HEIGHT, height + 1))
    # The last two lines say what the keys do, and here there are none; a prompt wants one.
    return _write("".join(plain(line).rstrip() + "\n" for line in lines[:-2]))


def _write(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wanted; what is still buffered must not fail at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
