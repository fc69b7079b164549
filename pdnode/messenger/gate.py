"""Who gets pages next: waits that are first come, first served, and fair over peers."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdnode.core.pages import PagePool
from pdnode.types import Run, count_pages


@dataclass(slots=True, eq=False)
class Ticket:
    """One wait for `count` pages. `cancel` gives up the place; after the grant it does nothing."""

    key: str
    count: int
    granted: Callable[[tuple[Run, ...]], None]
    waiting: bool = True

    def cancel(self) -> None:
        self.waiting = False


@dataclass(slots=True)
class PageGate:
    """Reserves pages of `pool`, or queues the wish: FIFO inside a key, round robin over keys.

    A wish that does not fit blocks those behind it, so that a large request is never starved by
    small ones. Nothing is granted while more than `max_quarantined` pages are quarantined.
    Call `pump` after pages came back; it calls `granted` of every wish that fits now.

    `shared`: one key (but "", this node) may hold as many pages as it leaves free, or one wish of
    any size; what it wants beyond that waits for its own pages and blocks no other key.
    """

    pool: PagePool
    max_quarantined: int
    shared: bool = False
    _held: Counter[str] = field(default_factory=Counter)
    _queues: OrderedDict[str, deque[Ticket]] = field(default_factory=OrderedDict)
    _pumping: bool = False

    @property
    def waiting(self) -> int:
        return sum(ticket.waiting for queue in self._queues.values() for ticket in queue)

    def request(
        self, count: int, granted: Callable[[tuple[Run, ...]], None], *, key: str = ""
    ) -> Ticket:
        """`granted(runs)` is called at once or later, on the event loop."""
        ticket = Ticket(key, count, granted)
        self._queues.setdefault(key, deque()).append(ticket)
        self.pump()
        return ticket

    async def reserve(self, count: int, *, key: str = "") -> tuple[Run, ...]:
        """Waits for `count` pages; a cancelled wait leaves nothing behind."""
        future: asyncio.Future[tuple[Run, ...]] = asyncio.get_running_loop().create_future()

        def granted(runs: tuple[Run, ...]) -> None:
            if future.done():  # cancelled between grant and wake-up
                self.release(runs, key=key)
            else:
                future.set_result(runs)

        ticket = self.request(count, granted, key=key)
        try:
            return await future
        except asyncio.CancelledError:
            ticket.cancel()
            if future.done() and not future.cancelled():
                self.release(future.result(), key=key)
            self.pump()
            raise

    def release(self, runs: tuple[Run, ...], *, key: str = "") -> None:
        """Give pages back that were granted to `key`, and see who can have them."""
        self.pool.release(runs)
        self._hold(key, -count_pages(runs))
        self.pump()

    def pump(self) -> None:
        if self._pumping:  # a callback released pages: the loop below looks again
            return
        self._pumping = True
        try:
            while (ticket := self._next()) is not None:
                ticket.waiting = False
                self._hold(ticket.key, ticket.count)
                ticket.granted(self.pool.reserve(ticket.count))
        finally:
            self._pumping = False

    def _next(self) -> Ticket | None:
        """Takes the next wish that may be granted out of its queue, if it fits."""
        for key in list(self._queues):
            queue = self._queues[key]
            while queue and not queue[0].waiting:
                queue.popleft()
            if not queue:
                del self._queues[key]
        if not self._queues or self.pool.counts.quarantined > self.max_quarantined:
            return None
        for key, queue in self._queues.items():
            if self._has_its_share(queue[0]):
                continue
            if not self.pool.can_reserve(queue[0].count):
                return None
            self._queues.move_to_end(key)
            return queue.popleft()
        return None

    def _hold(self, key: str, count: int) -> None:
        if not key:
            return
        self._held[key] += count
        assert self._held[key] >= 0, f"{key} gives back more pages than it was granted"
        if not self._held[key]:
            del self._held[key]

    def _has_its_share(self, ticket: Ticket) -> bool:
        held = self._held[ticket.key]
        left = self.pool.counts.free - ticket.count
        return self.shared and held > 0 and held + ticket.count > left
