"""Logging: one line per event, `key=value`, with a stable event code; never a prompt.

`event` is how the daemon says something; records of other libraries take the same way out. Where
the lines go decides their form: priority prefixes under journald, colour on a terminal, else plain
text, or JSON on demand. What repeats is limited per code, and how much was held back is said.
"""

import json
import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

Field = str | int | float | bool | None

LIMIT_LINES = 10
LIMIT_WINDOW_S = 10.0
"""At most so many lines of one code in so long a time."""

MAX_CODES = 512
MAX_VALUE_CHARS = 1000
MAX_TRACE_CHARS = 16000
_OWN_NAMES = frozenset({"time", "level", "code", "logger", "msg", "trace"})
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))
_COLOURS = ((logging.ERROR, "31"), (logging.WARNING, "33"), (logging.INFO, "32"), (0, "2"))


def event(logger: logging.Logger, level: int, code: str, text: str, /, **fields: Field) -> None:
    """Log one event. `code` is stable and names its kind; `text` is for people and is constant.

    What varies goes into `fields` (`req`, `peer`, `nic`, …); a field that is None is left out, and
    one with a name of the line itself (`code`, `level`, …) gets `field_` before it.
    """
    if logger.isEnabledFor(level):
        extra = {"code": code, "fields": fields}
        logger.log(level, "%s", text, extra=extra, stacklevel=2)


def _code(record: logging.LogRecord) -> str:
    code = getattr(record, "code", "")
    return code if isinstance(code, str) else ""


def fault(
    logger: logging.Logger, code: str, text: str, error: Exception, /, **fields: Field
) -> None:
    """Log an exception that nobody foresaw, with its trace."""
    extra = {"code": code, "fields": fields}
    logger.error("%s", text, exc_info=error, extra=extra, stacklevel=2)


def event_fields(record: logging.LogRecord) -> dict[str, Field]:
    fields = getattr(record, "fields", None)
    given = fields.items() if isinstance(fields, Mapping) else ()
    return {
        f"field_{key}" if key in _OWN_NAMES else key: value
        for key, value in given
        if value is not None
    }


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…(+{len(text) - most})"


def quoted(value: Field) -> str:
    """`value` as one word of a line: quoted where needed, without control characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _cut(str(value), MAX_VALUE_CHARS)
    if not text.isprintable():
        return json.dumps(text).replace("\x7f", "\\u007f")
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=\\') else text


def _trace(record: logging.LogRecord) -> str:
    if not record.exc_info:
        return ""
    trace = logging.Formatter().formatException(record.exc_info)
    # The end names the error; the middle of a deep recursion is what can be spared.
    half = MAX_TRACE_CHARS // 2
    return trace if len(trace) <= 2 * half else f"{trace[:half]}\n…\n{trace[-half:]}"


def _pairs(record: logging.LogRecord) -> list[str]:
    shown = [
        f"{key}={quoted(value)}" for key, value in event_fields(record).items() if value is not None
    ]
    if trace := _trace(record):
        shown.append("trace=" + json.dumps(trace))
    return shown


class TextFormatter(logging.Formatter):
    """`time=… level=… code=… msg=… key=value`; an event is one line, whatever it contains."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        words = [f"code={code}"] if (code := _code(record)) else [f"logger={record.name}"]
        words.append(f"msg={quoted(record.getMessage())}")
        words += _pairs(record)
        if self._journal:
            # journald has time and level of its own; the prefix carries the level to it.
            priority = next(p for level, p in _PRIORITIES if record.levelno >= level)
            return f"<{priority}>" + " ".join(words)
        stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return " ".join([f"time={stamp}", f"level={record.levelname.lower()}", *words])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, code, logger, msg, the fields, trace."""

    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, Field] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "code": _code(record),
            "logger": record.name,
            "msg": _cut(record.getMessage(), MAX_VALUE_CHARS),
        }
        for key, value in event_fields(record).items():
            out[key] = _cut(value, MAX_VALUE_CHARS) if isinstance(value, str) else value
        if trace := _trace(record):
            out["trace"] = trace
        return json.dumps(out)


class TerminalFormatter(logging.Formatter):
    """For people: local time, a coloured level, the text, then the fields; traces in full."""

    def format(self, record: logging.LogRecord) -> str:
        colour = next(c for level, c in _COLOURS if record.levelno >= level)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = record.getMessage()
        text = text if text.isprintable() else quoted(text)
        fields = " ".join(
            f"\x1b[2m{key}=\x1b[0m{quoted(value)}" for key, value in event_fields(record).items()
        )
        name = _code(record) or record.name
        line = f"{clock} \x1b[{colour}m{record.levelname.lower():<8}\x1b[0m{name:<6} {text}"
        trace = _trace(record)
        return line + (f"  {fields}" if fields else "") + (f"\n{trace}" if trace else "")


@dataclass(slots=True)
class _Window:
    ends: float
    passed: int = 0
    held: int = 0


class RateLimit:
    """Lets `lines` of one key pass in `window_s`, and counts the others. Pure: time is given."""

    def __init__(self, lines: int = LIMIT_LINES, window_s: float = LIMIT_WINDOW_S) -> None:
        self._lines = lines
        self._window_s = window_s
        self._windows: OrderedDict[str, _Window] = OrderedDict()  # in the order they end

    def admit(self, key: str, now: float) -> bool:
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window(now + self._window_s)
        passes = window.passed < self._lines
        window.passed += passes
        window.held += not passes
        return passes

    def ended(self, now: float) -> list[tuple[str, int]]:
        """(key, held back) of every window that is over, or had to go to bound their number."""
        out = []
        while self._windows:
            key, window = next(iter(self._windows.items()))
            if window.ends > now and len(self._windows) <= MAX_CODES:
                break
            del self._windows[key]
            if window.held:
                out.append((key, window.held))
        return out


class EventHandler(logging.StreamHandler[TextIO]):
    """Writes to a stream through the rate limit. Debug lines are asked for and never held back."""

    def __init__(
        self,
        stream: TextIO,
        *,
        limit: RateLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream)
        self.lines_held = 0  # since start
        self._limit = limit or RateLimit()
        self._clock = clock

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._report(now)
        # Lines without a code are told apart by their constant part.
        key = _code(record) or f"{record.name}: {record.msg}"[:200]
        if record.levelno < logging.INFO or self._limit.admit(key, now):
            super().emit(record)
        else:
            self.lines_held += 1

    def _report(self, now: float) -> None:
        for key, held in self._limit.ended(now):
            record = logging.LogRecord(
                "pdnode.log", logging.WARNING, __file__, 0, "lines held back", None, None
            )
            record.code = "log_held_back"
            record.fields = {"of": key, "lines": held, "window_s": LIMIT_WINDOW_S}
            super().emit(record)

    def close(self) -> None:
        """Say what is still held back: a burst just before the end must not vanish."""
        self.acquire()
        try:
            self._report(float("inf"))
        finally:
            self.release()
        super().close()


def _to_journal(stream: TextIO) -> bool:
    """$JOURNAL_STREAM names the device and inode of the journal; children may write elsewhere."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def choose_formatter(log_format: str, stream: TextIO) -> logging.Formatter:
    """For [node] log_format: auto | text | json."""
    if log_format == "json":
        return JsonFormatter()
    if log_format == "auto" and not _to_journal(stream) and stream.isatty():
        return TextFormatter(journal=False) if "NO_COLOR" in os.environ else TerminalFormatter()
    return TextFormatter(journal=_to_journal(stream))


def configure(*, level: str, log_format: str, stream: TextIO | None = None) -> EventHandler:
    """Send all logging of this process to `stream` (standard error), replacing what was there."""
    target = stream if stream is not None else sys.stderr
    handler = EventHandler(target)
    handler.setFormatter(choose_formatter(log_format, target))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # Where standard error is gone there is nobody to tell.
    logging.raiseExceptions = False
    return handler


def lines_held() -> int:
    """Lines that the rate limit has held back since `configure`."""
    handlers = logging.getLogger().handlers
    return sum(one.lines_held for one in handlers if isinstance(one, EventHandler))


def level() -> str:
    return logging.getLevelName(logging.getLogger().level).lower()


def set_level(name: str) -> None:
    """One of configschema.LOG_LEVELS."""
    logging.getLogger().setLevel(name.upper())
