"""The transfer core on an asyncio loop: its events reach handlers, one call per event."""

import asyncio
from collections.abc import Callable, Iterable

from pdnode.fabric._native import EVENT_KINDS, Event, Fabric

Handler = Callable[[Event], None]

EVENTS_PER_TURN = 256
"""Events handled before other callbacks of the loop get their turn."""


class FabricEngine:
    """Owns a native `Fabric` and dispatches its events by kind, on the loop's thread.

    Handlers may call the fabric. One that raises stops nothing: the loop's exception handler gets
    the error, the other events go on.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._handlers: dict[str, list[Handler]] = {kind: [] for kind in EVENT_KINDS}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event_fd = -1

    def on(self, kinds: Iterable[str], handler: Handler) -> None:
        """Call `handler` for every event of these kinds, in the order of registration."""
        for kind in kinds:
            if kind not in self._handlers:
                raise ValueError(f"event kind {kind!r} is not one of {', '.join(EVENT_KINDS)}")
            self._handlers[kind].append(handler)

    def clear(self) -> None:
        """Forget all handlers: events are dropped until others are named."""
        for handlers in self._handlers.values():
            handlers.clear()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read events on `loop` from now on; what waits already comes in the next turn."""
        assert self._loop is None, "started twice"
        self._loop = loop
        self._event_fd = self.fabric.event_fd
        loop.add_reader(self._event_fd, self._dispatch, loop)

    def close(self) -> str:
        """Stop reading, then close the fabric: joins its threads. Idempotent. Returns what the
        provider said of the first thing that it did not close, empty if there is none."""
        if self._loop is not None:
            self._loop.remove_reader(self._event_fd)
            self._loop = None
        return self.fabric.close()

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        for event in self.fabric.take_events(EVENTS_PER_TURN):
            for handler in self._handlers[event.kind]:
                try:
                    handler(event)
                except Exception as error:  # noqa: BLE001 - a handler's fault is its own
                    loop.call_exception_handler(
                        {"message": f"handler of {event!r} failed", "exception": error}
                    )
