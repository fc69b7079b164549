"""The KV messenger of a decode node: grants pages and an immediate to a prefill peer, and waits.

One `Pull` is one attempt at one peer. It owns its pages from `begin` until the grant is free:
whoever reads them (the schedule) calls `end`. Everything runs on the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdnode.config import PeerConfig
from pdnode.core import transfer, wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.grant import Grant, GrantState
from pdnode.core.plan import expected_units
from pdnode.core.slots import Slot, SlotPool
from pdnode.core.transfer import FailCause
from pdnode.fabric._native import Event, Fabric
from pdnode.messenger.digests import PageMismatch, PageVerifier, PullDigests
from pdnode.messenger.gate import PageGate
from pdnode.messenger.session import PeerSession
from pdnode.types import (
    BootId,
    NodeId,
    RequestKey,
    Run,
    SessionId,
    Verify,
    count_pages,
    expand_runs,
)

_OF_A_REQUEST = (wire.Accepted, wire.Progress, wire.Sent, wire.Failed, wire.Drained)


class Outcome(NamedTuple):
    """How an attempt went. `complete`: the pages hold the KV of all prompt tokens but the last."""

    complete: bool
    cause: FailCause | None = None
    text: str = ""


@dataclass(slots=True, eq=False)
class Pull:
    """One attempt. `outcome` resolves once; `broken` is called if complete pages turn out wrong."""

    grant: Grant
    session: PeerSession
    pages: tuple[Run, ...]
    tokens: int
    request_id: str
    sent_pages: int  # the first of `pages`: what the peer fills
    outcome: asyncio.Future[Outcome]
    group: int = 0  # of this node, that the pages belong to
    broken: Callable[[str], None] | None = None
    begun_at: float = 0.0
    complete_at: float = 0.0
    queue_s: float = 0.0  # as the prefill said
    prefill_s: float = 0.0
    units: int = 0  # page units expected
    digests: PullDigests | None = None
    unchecked: list[Slot] = field(default_factory=list)  # reached before all digests were known

    @property
    def over(self) -> bool:
        """Nothing of it can land any more; a reader may still have the pages."""
        return self.grant.state is GrantState.COMPLETE and self.grant.drained

    @property
    def readable(self) -> bool:
        """Complete, and not ended: pages that wait for a last look are nobody's to read."""
        return self.grant.reading and not (self.digests is not None and self.digests.ending)

    @property
    def quarantined(self) -> bool:
        """Nobody here reads or waits for the pages, and the peer may still write to them."""
        waits = self.grant.state is GrantState.DISPATCHED
        return not (waits or self.grant.reading or self.grant.drained)


@dataclass(slots=True)
class PullFigures:
    """Counters since start."""

    begun: int = 0
    complete: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)  # by peer


class PullMessenger:
    """Decode side. `gates`: one per TP group of this node, all of `geometry`.

    `drop_link(session, text)` makes the peer manager lose and fence a session. Without a
    `verifier` pages are never verified, whatever `peer` says.
    """

    def __init__(
        self,
        *,
        boot: BootId,
        geometry: KvGeometry,
        fabric: Fabric,
        gates: Sequence[PageGate],
        slots: SlotPool,
        peer: PeerConfig,
        drop_link: Callable[[PeerSession, str], None],
        clock: Callable[[], float],
        verifier: PageVerifier | None = None,
    ) -> None:
        self._boot = boot
        self._geometry = geometry
        self._fabric = fabric
        self._gates = gates
        self._slots = slots
        self._peer = peer
        self._drop_link = drop_link
        self._clock = clock
        self._verifier = verifier
        self._attempts = 0
        self._pulls: dict[RequestKey, Pull] = {}
        self._by_slot: dict[int, Pull] = {}
        self._slot_waiters: deque[asyncio.Future[Slot]] = deque()
        self._fencing: set[tuple[SessionId, transfer.Pair]] = set()
        self.figures = PullFigures()

    # attempts

    async def take_slot(self) -> Slot:
        """An immediate; waits while all are out."""
        slot = None if self._slot_waiters else self._slots.take()
        if slot is not None:
            return slot
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._slot_waiters.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.return_slot(future.result())
            raise

    def begin(
        self,
        session: PeerSession,
        *,
        request_id: str,
        prompt: tuple[int, ...],
        pages: tuple[Run, ...],
        slot: Slot,
        priority: int,
        traceparent: str = "",
        group: int = 0,
    ) -> Pull:
        """Send `dispatch`. The pull owns `pages` and `slot` from here on. Prompt: ≥ 2 tokens."""
        assert len(prompt) >= 2
        now = self._clock()
        sent = self._geometry.pages_for(len(prompt) - 1)
        self._attempts += 1
        key = RequestKey(f"{self._boot}:{self._attempts}")
        grant = Grant(
            key,
            slot,
            request_stall_s=self._peer.request_stall_s,
            drained_timeout_s=self._peer.drained_timeout_s,
        )
        pull = Pull(
            grant,
            session,
            pages,
            len(prompt) - 1,
            request_id,
            sent,
            asyncio.get_running_loop().create_future(),
            group,
            begun_at=now,
        )
        self._pulls[key] = pull
        verify = self._expect_digests(pull)
        self.figures.begun += 1
        self._arm(pull)
        session.send(
            wire.Dispatch(
                key=key,
                request_id=request_id,
                tokens=list(prompt[:-1]),
                pages=_first_pages(pages, sent),
                first_page=0,
                immediate=slot.immediate,
                context_slot=-1,
                deadline_s=self._peer.request_stall_s,
                priority=priority,
                verify=verify,
                traceparent=traceparent,
                group=group,
            )
        )
        self._apply(pull, grant.dispatched(now))
        return pull

    def abandon(self, pull: Pull) -> None:
        """Nobody waits for this attempt any more, whatever its state. Idempotent."""
        pull.outcome.cancel()
        if pull.grant.reading:
            self.end(pull)
        else:
            self._apply(pull, pull.grant.cancel(self._clock()))

    def end(self, pull: Pull) -> None:
        """Nobody reads the pages of a complete pull any more, but for a last look at them."""
        digests = pull.digests
        if digests is None or not digests.again or not pull.grant.reading:
            self._apply(pull, pull.grant.end(self._clock()))
        elif not digests.ending:
            digests.ending = True
            assert self._verifier is not None
            self._verifier.check(
                digests, digests.again, lambda found: self._checked_again(pull, digests, found)
            )

    def outstanding_tokens(self, node: NodeId) -> int:
        """Prompt tokens given to this peer whose pages are not complete."""
        return sum(
            pull.tokens
            for pull in self._pulls.values()
            if pull.session.node == node and pull.grant.state is GrantState.DISPATCHED
        )

    @property
    def open_pulls(self) -> int:
        """Attempts whose pages are still held for a peer or a reader."""
        return len(self._pulls)

    def open(self) -> Iterable[Pull]:
        """The attempts that `open_pulls` counts, oldest first. For those who watch."""
        return self._pulls.values()

    def units(self, pull: Pull) -> tuple[int, int]:
        """(page units that have landed under its present immediate, units expected)."""
        return min(self._fabric.counted(pull.grant.slot.slot), pull.units), pull.units

    def reload(self, peer: PeerConfig) -> None:
        """New limits, for attempts that begin from now on."""
        self._peer = peer

    def tick(self) -> None:
        now = self._clock()
        for pull in list(self._pulls.values()):
            if pull.grant.state is GrantState.DISPATCHED:
                units = self._fabric.counted(pull.grant.slot.slot)
                self._apply(pull, pull.grant.landed(units, now))
            self._apply(pull, pull.grant.tick(now))

    # the peer

    def session_frame(self, session: PeerSession, frame: wire.Frame) -> None:
        """Accepted, Progress, Failed, Drained and NicDown; other kinds are not for this side."""
        if isinstance(frame, wire.NicDown):
            self._fence_pair(session, frame.pair)
        elif isinstance(frame, _OF_A_REQUEST):
            pull = self._pulls.get(RequestKey(frame.key))
            # None: of an attempt that is over; every answer to it has been given.
            if pull is not None and pull.session is session:
                self._apply(pull, self._heard(pull, frame, self._clock()))

    def _heard(
        self,
        pull: Pull,
        frame: wire.Accepted | wire.Progress | wire.Sent | wire.Failed | wire.Drained,
        now: float,
    ) -> list[transfer.Effect]:
        match frame:
            case wire.Accepted(position=position):
                return pull.grant.accepted(position, now)
            case wire.Progress():
                pull.queue_s, pull.prefill_s = frame.queue_s, frame.prefill_s
                return pull.grant.progress(frame.computed_tokens, now)
            case wire.Sent():
                return self._heard_digests(pull, frame, now)
            case wire.Failed():
                text = wire.clip(frame.text)
                return pull.grant.failed(_cause(frame.cause), text, frame.pairs, now)
            case wire.Drained():
                pull.queue_s, pull.prefill_s = frame.queue_s, frame.prefill_s
                return pull.grant.drain_done(now)

    def session_lost(self, session: PeerSession, cause: str, *, silent: bool = False) -> None:
        for pull in self._of(session):
            self._apply(pull, pull.grant.session_lost(cause, self._clock(), silent=silent))

    def session_fenced(self, session: PeerSession) -> None:
        for pull in self._of(session):
            self._apply(pull, pull.grant.session_fenced())
        self._fencing = {entry for entry in self._fencing if entry[0] != session.session}

    def pair_lost(self, session: PeerSession, pair: transfer.Pair, cause: str) -> None:
        """A connection died and the link lives: as if the peer had said NicDown."""
        self._fence(session, pair)

    def pair_fenced(self, session: PeerSession, pair: transfer.Pair) -> None:
        """A fence that NicDown, Failed or a lost pair asked for is done: say so, have replayed."""
        if (session.session, pair) not in self._fencing:
            return
        self._fencing.discard((session.session, pair))
        session.pairs = tuple(other for other in session.pairs if other != pair)
        lent, session.lent = session.lent, ()
        session.send(wire.NicFenced(pair, list(lent)))
        if not session.pairs:
            self._drop_link(session, "no connection is left")
            return
        for pull in self._of(session):
            self._replay(pull)

    # the fabric

    def fabric_event(self, event: Event) -> None:
        """Events `reached` and `overshoot`."""
        pull = self._by_slot.get(event.slot)
        if pull is None:
            return
        slot = Slot(event.slot, event.generation)
        if event.kind == "reached" and pull.digests is not None:
            pull.unchecked.append(slot)
            self._check(pull, pull.digests)
        elif event.kind == "reached":
            self._apply(pull, pull.grant.reached(slot, self._clock()))
        else:
            self._apply(pull, pull.grant.overshoot(slot, self._clock()))

    # digests

    def _expect_digests(self, pull: Pull) -> Verify:
        if self._verifier is None or self._peer.verify is Verify.OFF:
            return Verify.OFF
        pages = expand_runs(pull.pages)[: pull.sent_pages]
        # What follows the prompt goes on in its last page, if that is not full.
        full = pull.tokens // self._geometry.page_tokens
        again = full if self._peer.verify is Verify.TWICE else 0
        pull.digests = self._verifier.expect(
            pull.session.geometry, pages, group=pull.group, again=again
        )
        return self._peer.verify

    def _heard_digests(self, pull: Pull, frame: wire.Sent, now: float) -> list[transfer.Effect]:
        if pull.digests is None:
            return []  # nobody asked
        wrong = pull.digests.said.add(frame.first, frame.digests)
        if wrong is not None:
            return pull.grant.distrust(pull.grant.slot, FailCause.REJECTED, wrong, now)
        self._check(pull, pull.digests)
        return []

    def _check(self, pull: Pull, digests: PullDigests) -> None:
        """Compare what has landed, once the peer has said what it should be."""
        assert self._verifier is not None
        if not digests.said.complete:
            return
        while pull.unchecked:
            slot = pull.unchecked.pop()
            self._verifier.check(
                digests,
                pull.sent_pages,
                lambda found, slot=slot: self._checked(pull, slot, found),  # type: ignore[misc]
            )

    def _checked(self, pull: Pull, slot: Slot, found: PageMismatch | None) -> None:
        assert self._verifier is not None
        if pull.grant.state is not GrantState.DISPATCHED:
            return  # given up meanwhile: the pages may have been anybody's
        text = self._verifier.report(
            "completion", pull.sent_pages, found, session=pull.session, request_id=pull.request_id
        )
        now = self._clock()
        if text:
            self._apply(pull, pull.grant.distrust(slot, FailCause.CORRUPT, text, now))
        else:
            self._apply(pull, pull.grant.reached(slot, now))

    def _checked_again(self, pull: Pull, digests: PullDigests, found: PageMismatch | None) -> None:
        assert self._verifier is not None
        self._verifier.report(
            "release", digests.again, found, session=pull.session, request_id=pull.request_id
        )
        self._apply(pull, pull.grant.end(self._clock()))

    # inside

    def _arm(self, pull: Pull) -> None:
        slot = pull.grant.slot
        self._by_slot[slot.slot] = pull
        pull.units = expected_units(pull.session.geometry, self._geometry, pull.sent_pages)
        self._fabric.arm(slot.slot, slot.generation, pull.session.session, pull.units)

    def _replay(self, pull: Pull) -> None:
        slot = self._slots.take() if pull.grant.wants_slot else None
        effects = pull.grant.pair_fenced(slot, self._clock())
        if slot is not None:
            self._arm(pull)  # before the peer hears of it; the old slot stays armed as well
        self._apply(pull, effects)

    def _fence_pair(self, session: PeerSession, pair: transfer.Pair) -> None:
        """The peer names a connection. About one that is gone it has been told."""
        if pair in session.pairs:
            self._fence(session, pair)

    def _fence(self, session: PeerSession, pair: transfer.Pair) -> None:
        if (session.session, pair) not in self._fencing:
            self._fencing.add((session.session, pair))
            self._fabric.fence(session.session, pair)

    def _of(self, session: PeerSession) -> list[Pull]:
        return [pull for pull in self._pulls.values() if pull.session is session]

    def _apply(self, pull: Pull, effects: list[transfer.Effect]) -> None:
        for effect in effects:
            match effect:
                case transfer.Send(frame=frame):
                    pull.session.send(frame)
                case transfer.Enter():
                    self._complete(pull)
                case transfer.Lost():
                    self._lost(pull, effect)
                case transfer.Quarantine():
                    self._gates[pull.group].pool.quarantine(pull.pages)
                case transfer.Free():
                    self._free(pull)
                case transfer.FencePairs(pairs=pairs):
                    for pair in pairs:
                        self._fence_pair(pull.session, pair)
                case transfer.DropLink(text=text):
                    self._drop_link(pull.session, text)
                case _:
                    raise AssertionError(f"not an effect of a grant: {effect}")

    def _complete(self, pull: Pull) -> None:
        pull.complete_at = self._clock()
        self._gates[pull.group].pool.activate(pull.pages)
        self.figures.complete += 1
        moved = (
            pull.sent_pages * self._geometry.layers * self._geometry.page_bytes * self._geometry.tp
        )
        node = pull.session.node
        self.figures.bytes[node] = self.figures.bytes.get(node, 0) + moved
        if pull.outcome.cancelled():  # its task was cancelled and has not come to abandon() yet
            self.end(pull)
        else:
            pull.outcome.set_result(Outcome(complete=True))

    def _lost(self, pull: Pull, lost: transfer.Lost) -> None:
        self.figures.failures[lost.cause] = self.figures.failures.get(lost.cause, 0) + 1
        if not pull.outcome.done():
            pull.outcome.set_result(Outcome(complete=False, cause=lost.cause, text=lost.text))
        elif pull.broken is not None:
            pull.broken(lost.text)
        elif pull.grant.reading:
            self.end(pull)  # complete, but its task has not had its turn: it looks at `readable`

    def _free(self, pull: Pull) -> None:
        del self._pulls[pull.grant.key]
        pull.broken = None  # it knows the request, which knows this pull
        for slot in pull.grant.slots:
            del self._by_slot[slot.slot]
            self._fabric.disarm(slot.slot)
            self.return_slot(slot)
        self._gates[pull.group].release(pull.pages)

    def return_slot(self, slot: Slot) -> None:
        """A slot that is not armed goes back, or to who waits for one."""
        self._slots.give_back(slot)
        while self._slot_waiters:
            waiter = self._slot_waiters.popleft()
            if not waiter.done():
                again = self._slots.take()
                assert again is not None
                waiter.set_result(again)
                return


def _cause(word: str) -> FailCause:
    """As a peer says it. That pages are corrupt is only ever found here: no other peer is asked
    then, which a peer has no say in."""
    known = set(FailCause) - {FailCause.CORRUPT}
    return FailCause(word) if word in known else FailCause.WRITE


def _first_pages(runs: tuple[Run, ...], count: int) -> list[wire.PageRun]:
    """The first `count` pages of `runs`."""
    assert count <= count_pages(runs)
    found = []
    for start, length in runs:
        if count == 0:
            break
        part = min(length, count)
        found.append(wire.PageRun(start, part))
        count -= part
    return found
