"""Byte streams between hosts: delayed, cut at any byte, half-open, held while partitioned.

A `Stream` stands for one WebSocket. It loses nothing but itself: frames come whole and in order, or
the rest never comes.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from tests.sim.kernel import Kernel, NodeLoop

_EOF = b""


class Route:
    """The way between two hosts, of the link or of the fabric. While `down` nothing passes."""

    def __init__(self, kernel: Kernel, delay: Callable[[], float]) -> None:
        self.kernel = kernel
        self.delay = delay
        self.down = False
        self._held: list[Callable[[], None]] = []

    def hold(self, act: Callable[[], None]) -> None:
        """Try again once the partition is over: packets are sent again."""
        self._held.append(act)

    def heal(self) -> None:
        self.down = False
        held, self._held = self._held, []
        for act in held:
            self.kernel.at(self.delay(), act)


class _Direction:
    """Frames on their way to one end."""

    def __init__(self, route: Route, to: "Socket") -> None:
        self._route = route
        self._to = to
        self._flying: deque[tuple[float, bytes]] = deque()
        self._last = 0.0
        self._due = False
        self.cut = False

    @property
    def flying(self) -> bool:
        return bool(self._flying)

    def send(self, data: bytes) -> None:
        if self.cut:
            return
        now = self._route.kernel.now
        self._last = max(self._last, now + self._route.delay())
        self._flying.append((self._last, data))
        self._arm()

    def lose(self) -> None:
        """The stream breaks at a byte: what is before it may still come, the rest never does."""
        self.cut = True
        rng = self._route.kernel.rng
        total = sum(len(data) for _, data in self._flying)
        left = rng.randint(0, total)
        kept: deque[tuple[float, bytes]] = deque()
        for at, data in self._flying:
            left -= len(data)
            if left < 0 or data is _EOF:
                break
            kept.append((at, data))
        self._flying = kept

    def end(self) -> None:
        """After what still comes, the end."""
        at = max(self._last, self._route.kernel.now + self._route.delay())
        self._flying.append((at, _EOF))
        self.cut = True
        self._arm()

    def _arm(self) -> None:
        if self._flying and not self._due:
            self._due = True
            delay = max(0.0, self._flying[0][0] - self._route.kernel.now)
            self._route.kernel.at(delay, self._deliver)

    def _deliver(self) -> None:
        self._due = False
        if not self._flying:
            return
        if self._route.down:
            self._due = True
            self._route.hold(self._deliver)
            return
        _, data = self._flying.popleft()
        self._to.arrived(data)
        self._arm()


class Socket:
    """One end: messenger.peer_link.Transport."""

    def __init__(self, loop: NodeLoop, address: str) -> None:
        self.cause = ""
        self.address = address
        self.other: Socket | None = None
        self._loop = loop
        self._out: _Direction | None = None
        self._inbox: deque[bytes] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def out(self) -> _Direction:
        assert self._out is not None
        return self._out

    def join(self, route: Route, other: "Socket") -> None:
        self.other = other
        self._out = _Direction(route, other)

    def send(self, data: bytes) -> None:
        if not self._closed and self._loop.alive:
            self.out.send(data)

    async def receive(self) -> bytes | None:
        while not self._inbox:
            if self._closed:
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        data = self._inbox.popleft()
        if data is _EOF:
            self.cause = self.cause or "closed by the peer's side"
            self._inbox.appendleft(_EOF)
            return None
        return data

    def proved(self) -> None:
        pass

    def close(self, text: str) -> None:
        if not self._closed and self._loop.alive:
            self._closed = True
            self.cause = self.cause or text
            self.out.end()
            self._rouse()

    async def wait_closed(self) -> None:
        pass

    # the network's side

    @property
    def silent(self) -> bool:
        """Nothing is lost, no frame is on its way, and neither process has one to take."""
        assert self.other is not None
        return not any(
            end.out.cut or end.out.flying or end._inbox or end._loop.has_work
            for end in (self, self.other)
        )

    def arrived(self, data: bytes) -> None:
        if self._loop.alive and not self._closed:
            self._inbox.append(data)
            self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Stream:
    """A WebSocket between two processes, over `route`."""

    def __init__(self, route: Route, dialer: Socket, acceptor: Socket) -> None:
        self.ends = (dialer, acceptor)
        dialer.join(route, acceptor)
        acceptor.join(route, dialer)

    @property
    def broken(self) -> bool:
        return all(end.out.cut for end in self.ends)

    def cut(self, told: tuple[bool, bool]) -> None:
        """Lost at a byte. `told`: whether dialer and acceptor hear of it; half-open otherwise."""
        for end, tell in zip(self.ends, told[::-1], strict=True):
            end.out.lose()
            if tell:
                end.out.end()

    def process_died(self, end: Socket) -> None:
        """Its kernel sends what it still has, or not, and resets; nothing comes in any more."""
        end.out.lose()
        end.out.end()
