"""Lines as they leave the process: their form, what they escape, what is held back."""

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdnode.obs import log
from pdnode.obs.log import EventHandler, JsonFormatter, RateLimit, TerminalFormatter, TextFormatter

LOGGER = logging.getLogger("pdnode.test_log")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def handler(stream: io.StringIO, clock: Clock) -> Iterator[EventHandler]:
    handler = EventHandler(stream, clock=clock)
    handler.setFormatter(TextFormatter(journal=True))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False
    yield handler
    LOGGER.removeHandler(handler)


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("level", "priority"),
    [("debug", 7), ("info", 6), ("warning", 4), ("error", 3), ("critical", 3)],
)
def test_journal_line(
    handler: EventHandler, stream: io.StringIO, level: str, priority: int
) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    log.event(LOGGER, number, "peer_lost", "lost a peer", peer="b", rtt_s=0.25, up=True, nic=None)
    assert lines(stream) == [
        f'<{priority}>code=peer_lost msg="lost a peer" peer=b rtt_s=0.25 up=true'
    ]


def test_text_line_has_time_and_level(handler: EventHandler, stream: io.StringIO) -> None:
    handler.setFormatter(TextFormatter(journal=False))
    log.event(LOGGER, logging.INFO, "up", "up")
    assert re.fullmatch(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 level=info code=up msg=up",
        lines(stream)[0],
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("a b", '"a b"'),
        ('say "x"', '"say \\"x\\""'),
        ("a=b", '"a=b"'),
        ("évora", "évora"),
        ("line\nbreak", '"line\\nbreak"'),
        ("\x1b[31mred\x7f\x9b", '"\\u001b[31mred\\u007f\\u009b"'),
        (1e-7, "1e-07"),
        (False, "false"),
        (7, "7"),
    ],
)
def test_values_are_one_word_without_control_characters(
    handler: EventHandler, stream: io.StringIO, value: log.Field, shown: str
) -> None:
    log.event(LOGGER, logging.INFO, "c", "t", field=value)
    assert lines(stream) == [f"<6>code=c msg=t field={shown}"]


def test_long_values_are_cut(handler: EventHandler, stream: io.StringIO) -> None:
    log.event(LOGGER, logging.INFO, "c", "t", field="x" * 5000)
    assert lines(stream) == [f"<6>code=c msg=t field={'x' * 1000}…(+4000)"]


def test_fields_do_not_hide_the_names_of_the_line(
    handler: EventHandler, stream: io.StringIO
) -> None:
    log.event(LOGGER, logging.INFO, "exit", "t", code=3, level="x")
    handler.setFormatter(JsonFormatter())
    log.event(LOGGER, logging.INFO, "exit", "t", code=3)
    first, second = lines(stream)
    assert first == "<6>code=exit msg=t field_code=3 field_level=x"
    found = json.loads(second)
    assert (found["code"], found["field_code"], found["msg"]) == ("exit", 3, "t")


def test_a_trace_stays_in_its_line(handler: EventHandler, stream: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        LOGGER.exception("failed in %s", "step")
    (line,) = lines(stream)
    assert line.startswith('<3>logger=pdnode.test_log msg="failed in step" trace="Traceback')
    assert "ValueError: two\\nlines" in line


def test_json_line(handler: EventHandler, stream: io.StringIO) -> None:
    handler.setFormatter(JsonFormatter())
    log.event(LOGGER, logging.WARNING, "c", "t", count=2, ok=True, peer="b\n")
    found = json.loads(lines(stream)[0])
    del found["time"]
    assert found == {
        "level": "warning",
        "code": "c",
        "logger": "pdnode.test_log",
        "msg": "t",
        "count": 2,
        "ok": True,
        "peer": "b\n",
    }


def test_terminal_line_is_coloured_and_safe(handler: EventHandler, stream: io.StringIO) -> None:
    handler.setFormatter(TerminalFormatter())
    LOGGER.warning("bad \x1b[2J thing")
    log.event(LOGGER, logging.ERROR, "c", "text", peer="b")
    first, second = lines(stream)
    assert "\x1b[33mwarning" in first
    assert "\x1b[2J" not in first
    assert second.endswith("\x1b[31merror   \x1b[0mc      text  \x1b[2mpeer=\x1b[0mb")


def test_repeats_are_held_back_per_code(
    handler: EventHandler, stream: io.StringIO, clock: Clock
) -> None:
    for _ in range(25):
        log.event(LOGGER, logging.ERROR, "a", "flood")
    log.event(LOGGER, logging.ERROR, "b", "other")
    assert [line.split()[0] for line in lines(stream)] == ["<3>code=a"] * 10 + ["<3>code=b"]
    clock.now = 9.9
    log.event(LOGGER, logging.ERROR, "a", "flood")
    assert len(lines(stream)) == 11
    clock.now = 10.0
    log.event(LOGGER, logging.ERROR, "a", "flood")
    assert lines(stream)[11:] == [
        '<4>code=log_held_back msg="lines held back" of=a lines=16 window_s=10',
        "<3>code=a msg=flood",
    ]


def test_records_of_libraries_are_limited_by_their_constant_part(
    handler: EventHandler, stream: io.StringIO
) -> None:
    for number in range(30):
        LOGGER.info("connection %d", number)
    assert len(lines(stream)) == 10


def test_debug_is_not_held_back(handler: EventHandler, stream: io.StringIO) -> None:
    for _ in range(30):
        log.event(LOGGER, logging.DEBUG, "a", "t")
    assert len(lines(stream)) == 30


def test_what_is_held_back_at_the_end_is_said(handler: EventHandler, stream: io.StringIO) -> None:
    for _ in range(12):
        log.event(LOGGER, logging.INFO, "a", "t")
    handler.close()
    assert lines(stream)[-1] == (
        '<4>code=log_held_back msg="lines held back" of=a lines=2 window_s=10'
    )


def test_number_of_codes_is_bounded() -> None:
    limit = RateLimit(lines=1)
    for number in range(2 * log.MAX_CODES):
        assert limit.admit(f"code {number}", 0.0)
        assert not limit.admit(f"code {number}", 0.0)
        # The oldest window goes, and what it held back is told.
        expected = [(f"code {number - log.MAX_CODES}", 1)] if number >= log.MAX_CODES else []
        assert limit.ended(0.0) == expected


SCRIPT = """
import logging, sys
from pdnode.obs import log
log.configure(level="info", log_format=sys.argv[1])
log.event(logging.getLogger("x"), logging.INFO, "c", "t", a=1)
log.event(logging.getLogger("x"), logging.DEBUG, "d", "t")
import warnings; warnings.warn("old")
"""


@pytest.mark.parametrize(
    ("log_format", "journal", "start"),
    [
        ("auto", False, "time="),
        ("auto", True, "<6>code=c msg=t a=1"),
        ("text", True, "<6>code=c msg=t a=1"),
        ("json", True, '{"time"'),
    ],
)
def test_form_follows_from_where_it_goes(log_format: str, journal: bool, start: str) -> None:
    read, write = os.pipe()
    status = os.fstat(write)
    inode = status.st_ino if journal else 1
    env = dict(os.environ, JOURNAL_STREAM=f"{status.st_dev}:{inode}")
    with open(read, encoding="utf-8") as output:
        try:
            subprocess.run(
                [sys.executable, "-c", SCRIPT, log_format],
                stderr=write, env=env, check=True, timeout=30,
            )  # fmt: skip
        finally:
            os.close(write)
        found = output.read().splitlines()
    assert found[0].startswith(start)
    assert len(found) == 2  # no debug line; the warning of the library is one line
    assert "UserWarning: old" in found[1]
