"""The last events of this node as its log shows them, each with a cursor: `/admin/v1/events`.

A handler of the log, so that an event is said once and appears in both places. Prompts and secrets
are never in it because they are never in the log.
"""

import asyncio
import logging
import threading
from collections import deque

from pdnode.obs.log import event_fields, quoted
from pdnode.obs.snapshot import Event

RING = 1024
MAX_TEXT = 500


class EventRing(logging.Handler):
    """Keeps the last RING events of level INFO and above that have a code.

    Records may come from any thread; `after`, `last` and `wait` are for the event loop.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._ring: deque[Event] = deque(maxlen=RING)
        self._count = 0
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        code = getattr(record, "code", "")
        if not code:
            return
        fields = event_fields(record).items()
        words = [record.getMessage(), *(f"{key}={quoted(value)}" for key, value in fields)]
        level = record.levelno
        with self._guard:
            self._count += 1
            self._ring.append(
                Event(
                    cursor=self._count,
                    time_s=record.created,
                    severity=(
                        "error" if level >= logging.ERROR
                        else "warning" if level >= logging.WARNING
                        else "info"
                    ),
                    code=code,
                    text=" ".join(words)[:MAX_TEXT],
                )
            )  # fmt: skip
            for loop, wake in self._waiters:
                loop.call_soon_threadsafe(wake.set)

    def last(self, count: int) -> tuple[Event, ...]:
        """The newest `count`, oldest first."""
        with self._guard:
            return tuple(self._ring)[-count:] if count else ()

    def after(self, cursor: int) -> list[Event]:
        """Events after `cursor`, oldest first. Those that have left the ring are a gap in the
        cursors; a cursor that was never given out gets all that is there.
        """
        with self._guard:
            wanted = self._count - cursor if 0 <= cursor <= self._count else RING
            return list(self._ring)[-wanted:] if wanted else []

    async def wait(self, cursor: int) -> None:
        """Returns when there is an event after `cursor`."""
        wake = asyncio.Event()
        entry = (asyncio.get_running_loop(), wake)
        with self._guard:
            self._waiters.add(entry)
        try:
            while not self.after(cursor):
                wake.clear()
                if not self.after(cursor):
                    await wake.wait()
        finally:
            with self._guard:
                self._waiters.discard(entry)
