"""Test writes over one connection of a session, for `pdnode fabric-test`.

The decode node lends pages and an immediate and says what to write (`TestWrites`); the prefill node
writes, one write after the other or as many at a time as the core does, and says how long it took
(`TestWritten`). The rule of all pages holds: they are free once the prefill node has said that all
came back with success, or after a fence of that connection. Everything runs on the event loop.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdnode.core import wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.slots import Slot
from pdnode.fabric._native import Event, Fabric, FabricError
from pdnode.messenger.devices import ONE_GROUP, Devices
from pdnode.messenger.dispatch import check_immediate
from pdnode.messenger.gate import PageGate
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.session import PeerSession
from pdnode.types import Run, TransferId, expand_runs

MAX_SERIAL = 256
REACHED_S = 5.0
"""How long the last immediates may be on their way after the sender heard of success."""

Pair = tuple[int, int]


@dataclass(slots=True)
class _Sending:
    session: PeerSession
    ask: wire.TestWrites
    source: tuple[Run, ...]
    transfer: TransferId | None = None
    seconds: list[float] = field(default_factory=list)
    cause: str = ""
    stopped: bool = False


class TestSender:
    """Prefill side: one test at a time. `region` is that of the node's first rank, whose pages
    `gate` gives out; `mtu_of(nic)` is of a local NIC, 0 where it is not known."""

    __test__ = False  # no test class

    def __init__(
        self,
        *,
        fabric: Fabric,
        gate: PageGate,
        region: int,
        geometry: KvGeometry,
        next_transfer: Callable[[], TransferId],
        mtu_of: Callable[[int], int],
        devices: Devices = ONE_GROUP,
    ) -> None:
        self._fabric = fabric
        self._gate = gate
        self._region = region
        self._geometry = geometry
        self._next_transfer = next_transfer
        self._mtu_of = mtu_of
        self._devices = devices
        self._now: _Sending | None = None

    def frame(self, session: PeerSession, frame: wire.Frame) -> None:
        if not isinstance(frame, wire.TestWrites):
            return
        problem = self._objection(session, frame)
        if problem is not None:
            session.send(wire.TestWritten(frame.key, [], wire.clip(problem), clean=True, mtu=0))
            return
        source = self._gate.pool.reserve(sum(run.count for run in frame.pages))
        self._gate.pool.activate(source)
        self._now = _Sending(session, frame, source)
        self._next(self._now)

    def session_lost(self, session: PeerSession) -> None:
        """The fence gives all writes back: `settled` or `drained` follows."""
        if self._now is not None and self._now.session is session:
            self._now.stopped = True

    def pair_fenced(self, session: PeerSession, pair: Pair) -> None:
        """Nothing to do: what was written over it comes back as failed."""

    def session_fenced(self, session: PeerSession) -> None:
        """As `pair_fenced`."""

    def fabric_event(self, event: Event) -> None:
        """Events `drained`, `failed` and `settled` of all transfers."""
        now = self._now
        if now is None or event.transfer != now.transfer:
            return
        if event.kind == "failed":
            now.cause = event.text or "a write came back with an error"
            return
        rows = self._fabric.close_transfer(event.transfer)
        if event.kind == "settled":
            self._end(now, clean=False)
            return
        if rows:
            posted_ns = min(row[3] for row in rows)
            now.seconds.append((max(row[4] for row in rows) - posted_ns) / 1e9)
        over = not now.ask.serial or len(now.seconds) == now.ask.passes
        if over or now.cause or now.stopped:
            self._end(now, clean=True)
        else:
            self._next(now)

    # inside

    def _objection(self, session: PeerSession, ask: wire.TestWrites) -> str | None:
        pages = sum(run.count for run in ask.pages)
        there = session.geometry
        if self._now is not None:
            return "another test is running on the prefill node"
        if (ask.pair[1], ask.pair[0]) not in session.pairs:
            return f"NIC pair {ask.pair} is not connected"
        if (problem := check_immediate(ask.immediate)) is not None:
            return problem
        if ask.rank >= there.tp * session.groups:
            return f"rank: {ask.rank} of {there.tp * session.groups}"
        if not 1 <= ask.length <= min(there.page_bytes, self._geometry.page_bytes):
            return f"length: {ask.length}, a page has {self._geometry.page_bytes} bytes"
        if ask.serial and (ask.passes > MAX_SERIAL or pages != 1):
            return f"passes: {ask.passes}, at most {MAX_SERIAL} of one page one by one"
        if any(run.count < 1 or run.start + run.count > there.pages for run in ask.pages):
            return f"pages: outside 0 to {there.pages - 1}"
        if not self._gate.pool.can_reserve(pages):
            return f"{pages} pages are not free on the prefill node"
        return None

    def _next(self, now: _Sending) -> None:
        ask = now.ask
        transfer = now.transfer = self._next_transfer()
        here, there = self._geometry, now.session.geometry
        targets = (page for run in ask.pages for page in range(run.start, run.start + run.count))
        spans = [(s, d, 1) for s, d in zip(expand_runs(now.source), targets, strict=True)]
        try:
            self._fabric.open_transfer(
                transfer, now.session.session, ask.immediate, (ask.pair[1], ask.pair[0])
            )
        except FabricError as error:
            now.cause = str(error)
            self._end(now, clean=True)
            return
        try:
            self._fabric.submit(
                transfer,
                counter=-1,
                base=0,
                layers=1 if ask.serial else ask.passes,
                region=self._region,
                source_layer_stride=0,
                source_page_stride=here.page_bytes,
                source_offset=0,
                remote_rank=ask.rank,
                remote_layer_stride=0,
                remote_page_stride=there.page_bytes,
                remote_offset=0,
                length=ask.length,
                whole_page=ask.length == here.page_bytes == there.page_bytes,
                spans=spans,
                group=self._devices.group_of(ask.pair[1]),
            )
        except FabricError as error:
            now.cause = str(error)
        self._fabric.finish(transfer)

    def _end(self, now: _Sending, *, clean: bool) -> None:
        self._now = None
        self._gate.release(now.source)
        mtu = self._mtu_of(now.ask.pair[1])
        cause = wire.clip(now.cause)
        now.session.send(wire.TestWritten(now.ask.key, now.seconds, cause, clean=clean, mtu=mtu))


@dataclass(frozen=True, slots=True)
class Written:
    """What came of some test writes. `seconds`: of each write, or of all together."""

    seconds: list[float]
    cause: str  # "": all came back with success
    counted: int  # page units
    expected: int
    mtu: int  # of the peer's NIC; 0: not known


@dataclass(slots=True, eq=False)
class _Lent:
    """Pages and slot of one ask, until nothing of it can land any more."""

    session: PeerSession
    pair: Pair
    slot: Slot
    gate: PageGate
    pages: tuple[Run, ...]
    answer: asyncio.Future[wire.TestWritten]
    reached: asyncio.Event
    failed: bool = False


class TestReceiver:
    """Decode side. `gates` give out pages, one per TP group; `rank_of(nic)` is a rank whose memory
    a local NIC is for."""

    __test__ = False  # no test class

    def __init__(
        self,
        *,
        fabric: Fabric,
        gates: Sequence[PageGate],
        pulls: PullMessenger,
        tp: int = 1,
        rank_of: Callable[[int], int] = lambda nic: 0,
    ) -> None:
        self._fabric = fabric
        self._gates = gates
        self._pulls = pulls
        self._tp = tp
        self._rank_of = rank_of
        self._numbers = 0
        self._lent: dict[str, _Lent] = {}

    async def write(
        self,
        session: PeerSession,
        pair: Pair,
        *,
        pages: int,
        passes: int,
        length: int,
        serial: bool,
        timeout_s: float,
    ) -> Written:
        """Have the peer write over `pair`. A test that fails or takes longer than `timeout_s` ends
        that connection, as any writes that fail do."""
        slot = await self._pulls.take_slot()
        rank = self._rank_of(pair[0])
        gate = self._gates[rank // self._tp]
        try:
            runs = await gate.reserve(pages)
        except asyncio.CancelledError:
            self._pulls.return_slot(slot)
            raise
        expected = passes * pages
        if not session.up or pair not in session.pairs:  # no fence of it would be heard of again
            self._pulls.return_slot(slot)
            gate.release(runs)
            return Written([], "the connection was lost", 0, expected, 0)
        self._numbers += 1
        key = f"{session.boot}:test:{self._numbers}"
        future: asyncio.Future[wire.TestWritten] = asyncio.get_running_loop().create_future()
        lent = self._lent[key] = _Lent(session, pair, slot, gate, runs, future, asyncio.Event())
        self._fabric.arm(slot.slot, slot.generation, session.session, expected)
        session.send(
            wire.TestWrites(
                key=key,
                pair=pair,
                immediate=slot.immediate,
                pages=[wire.PageRun(run.start, run.count) for run in runs],
                passes=passes,
                length=length,
                serial=serial,
                rank=rank,
            )
        )
        try:
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            cause = f"not done within {timeout_s:g} s"
            self._fail(lent, f"fabric test: {cause}")
            return Written([], cause, self._fabric.counted(slot.slot), expected, 0)
        except asyncio.CancelledError:  # the peer goes on, and has as long for it
            asyncio.get_running_loop().call_later(timeout_s, self._expire, key)
            raise
        try:
            if not answer.cause:
                with contextlib.suppress(TimeoutError):  # then `counted` tells
                    async with asyncio.timeout(REACHED_S):
                        await lent.reached.wait()
            counted = self._fabric.counted(slot.slot) if key in self._lent else 0
        finally:
            if answer.clean:
                self._free(key)
        return Written(answer.seconds, answer.cause, counted, expected, answer.mtu)

    def frame(self, session: PeerSession, frame: wire.Frame) -> None:
        if not isinstance(frame, wire.TestWritten):
            return
        lent = self._lent.get(frame.key)
        if lent is None or lent.session is not session:
            return
        if not frame.clean:
            self._fail(lent, f"fabric test: {frame.cause}")
        if not lent.answer.done():
            lent.answer.set_result(frame)
        elif frame.clean:  # nobody waits any more
            self._free(frame.key)

    def session_lost(self, session: PeerSession) -> None:
        for lent in self._of(session).values():
            self._lost(lent, "the session was lost")
            lent.failed = True

    def session_fenced(self, session: PeerSession) -> None:
        for key in self._of(session):
            self._free(key)

    def pair_fenced(self, session: PeerSession, pair: Pair) -> None:
        for key, lent in self._of(session).items():
            if lent.pair == pair:
                self._lost(lent, "the connection was lost")
                self._free(key)

    def fabric_event(self, event: Event) -> None:
        """Events `reached` and `overshoot` of all slots."""
        for lent in self._lent.values():
            if (lent.slot.slot, lent.slot.generation) == (event.slot, event.generation):
                lent.reached.set()

    # inside

    def _of(self, session: PeerSession) -> dict[str, _Lent]:
        return {key: lent for key, lent in self._lent.items() if lent.session is session}

    def _lost(self, lent: _Lent, cause: str) -> None:
        """The peer's word on it is not waited for."""
        if not lent.answer.done():
            lent.answer.set_result(wire.TestWritten("-", [], cause, clean=False, mtu=0))

    def _fail(self, lent: _Lent, text: str) -> None:
        """Until the fence the writes may land: the messenger fences, as for any lost connection."""
        if not lent.failed:
            lent.failed = True
            lent.gate.pool.quarantine(lent.pages)
            self._pulls.pair_lost(lent.session, lent.pair, text)

    def _expire(self, key: str) -> None:
        """Nobody waits for this test any more, and the peer has not said that it is over."""
        lent = self._lent.get(key)
        if lent is not None:
            self._fail(lent, "fabric test: no answer in time")

    def _free(self, key: str) -> None:
        lent = self._lent.pop(key, None)
        if lent is None:  # its session was fenced meanwhile
            return
        self._fabric.disarm(lent.slot.slot)
        self._pulls.return_slot(lent.slot)
        lent.gate.release(lent.pages)
