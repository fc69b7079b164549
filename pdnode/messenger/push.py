"""The KV messenger of a prefill node: takes dispatches, follows the passes, pushes pages, drains.

A dispatch becomes a `Push` of the TP group with the fewest tokens waiting and, once it has source
pages, a sequence in that group's schedule that never samples. For each of its chunks the step loop
calls `planned` before the pass runs (the layer programs go to the core) and `computed` after it.
Everything runs on the event loop.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pdnode.config import PeerConfig
from pdnode.core import transfer, wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.plan import chunk_pages, programs, routes
from pdnode.core.push import Push
from pdnode.core.schedule import Chunk
from pdnode.core.transfer import FailCause
from pdnode.fabric._native import Event, Fabric, FabricError
from pdnode.messenger.devices import ONE_GROUP, Devices
from pdnode.messenger.digests import Digester, SourceDigests
from pdnode.messenger.dispatch import DispatchLimits, check_dispatch, check_regrant
from pdnode.messenger.groups import SourceGroup
from pdnode.messenger.places import Places
from pdnode.messenger.push_figures import OpenPush, PushFigures
from pdnode.messenger.push_work import PushWork
from pdnode.messenger.session import PeerSession
from pdnode.obs.log import event
from pdnode.obs.records import LayerTimes, Records
from pdnode.obs.trace import trace_id
from pdnode.types import RequestKey, Run, SessionId, TransferId, Verify, expand_runs

_log = logging.getLogger(__name__)

RETELL_RATIO = 0.25
"""A waiting request hears that others move this often in the time after which it is given up."""


class PushMessenger:
    """Prefill side. `drop_link(session, text)` makes the peer manager lose and fence a session.
    Without a `digester` a dispatch that asks for digests is refused."""

    def __init__(
        self,
        *,
        geometry: KvGeometry,
        limits: DispatchLimits,
        fabric: Fabric,
        groups: Sequence[SourceGroup],
        peer: PeerConfig,
        drop_link: Callable[[PeerSession, str], None],
        records: Records,
        clock: Callable[[], float],
        digester: Digester | None = None,
        devices: Devices = ONE_GROUP,
    ) -> None:
        assert groups
        assert all(len(group.regions) == geometry.tp for group in groups)
        self._geometry = geometry
        self._limits = limits
        self._fabric = fabric
        self._groups = groups
        self._peer = peer
        self._drop_link = drop_link
        self._records = records
        self._clock = clock
        self._digester = digester
        self._devices = devices
        self._transfers = 0
        self._work: dict[RequestKey, PushWork] = {}
        self._by_transfer: dict[TransferId, PushWork] = {}
        self._down: set[tuple[SessionId, transfer.Pair]] = set()  # pairs that NicDown was sent for
        self._chunks = 0  # computed since start
        self._places = Places()
        self.draining = False
        self.figures = PushFigures()

    @property
    def open_pushes(self) -> int:
        """Requests that hold a place, pages or owe a `drained`."""
        return len(self._work)

    def open(self) -> Iterator[OpenPush]:
        """The requests that `open_pushes` counts, oldest first."""
        for work in self._work.values():
            yield OpenPush(work.dispatch, work.session.node, work.push, work.begun_at)

    def reload(self, peer: PeerConfig, *, max_waiting: int) -> None:
        """New limits, for dispatches that come from now on."""
        self._peer = peer
        self._limits = replace(self._limits, max_waiting=max_waiting)

    def waiting_tokens(self) -> int:
        """Prompt tokens that wait for pages or for the schedule."""
        return sum(map(self._load, self._groups))

    def tick(self) -> None:
        now = self._clock()
        for position, work in enumerate(list(self._work.values())):
            self._apply(work, work.push.tick(now))
            self._retell(work, position, now)

    def engine_failed(self, text: str) -> None:
        """The worker died: every request ends with a failure that names the cause."""
        for work in list(self._work.values()):
            self._apply(work, work.push.engine_failed(text, self._clock()))

    # the peer

    def session_frame(self, session: PeerSession, frame: wire.Frame) -> None:
        """Dispatch, Cancel, Regrant and NicFenced; other kinds are not for this side."""
        now = self._clock()
        match frame:
            case wire.Dispatch():
                self._dispatch(session, frame, now)
            case wire.Cancel(key=key):
                work = self._find(session, key)
                if work is None:
                    session.send(wire.Drained(key, 0.0, 0.0))  # nothing of it is outstanding
                else:
                    self._apply(work, work.push.cancel(now))
            case wire.Regrant():
                self._regrant(session, frame, now)
            case wire.NicFenced(pair=pair):
                self._nic_fenced(session, pair, now)
            case _:
                pass

    def _regrant(self, session: PeerSession, frame: wire.Regrant, now: float) -> None:
        work = self._find(session, frame.key)
        if work is None:
            self._refuse(session, frame.key, FailCause.UNKNOWN, "no such request here")
        elif (problem := check_regrant(frame, replays=len(work.chunks) - 1)) is not None:
            self._refused(work, problem)
        else:
            self._apply(work, work.push.regrant(frame.immediate, now))

    def session_up(self, session: PeerSession) -> None:
        self._places.session_up(session)
        self._share_pages()

    def _share_pages(self) -> None:
        for group in self._groups:
            group.gate.shared = self._places.shared
            group.gate.pump()

    def session_lost(self, session: PeerSession) -> None:
        self._places.session_lost(session)
        self._share_pages()
        for work in self._of(session):
            work.outcome = FailCause.LINK_LOST
            self._apply(work, work.push.session_lost(self._clock()))
        self._down = {entry for entry in self._down if entry[0] != session.session}

    def pair_lost(self, session: PeerSession, pair: tuple[int, int], cause: str) -> None:
        """A connection (local, remote NIC) died and the link lives: writes may be missing."""
        self._pair_down(session, _turned(pair), cause)

    def pair_up(self, session: PeerSession, pair: tuple[int, int]) -> None:
        """A pair is back: if it is lost again, the decode node must be told again."""
        self._down.discard((session.session, _turned(pair)))

    # the fabric

    def fabric_event(self, event: Event) -> None:
        """Events `drained`, `failed` and `settled`."""
        number = TransferId(event.transfer)
        work = self._by_transfer.get(number)
        if work is None:
            return
        now = self._clock()
        push = work.push
        if event.kind == "drained":
            work.held = number
            self._release(work)
            return
        pairs = [_turned(pair) for pair in event.pairs]
        live = [_turned(pair) for pair in work.session.pairs]
        text = event.text or "a write came back with an error"
        if event.kind == "settled":
            found = push.transfer_settled(number, pairs, text=text, live=live, now=now)
        else:
            found = push.transfer_failed(
                number, pairs, text=text, live=live, stranded=work.shaken, now=now
            )
        self._apply(work, found)

    # inside: one dispatch

    def _retell(self, work: PushWork, position: int, now: float) -> None:
        """A request that waits while others are computed is not stalled: say so in time."""
        after_s = RETELL_RATIO * work.dispatch.deadline_s
        if not work.push.waits or now - work.told_at < after_s:
            return
        if self._chunks > work.told_chunks:
            work.told_at, work.told_chunks = now, self._chunks
            work.session.send(wire.Accepted(work.push.key, position))

    def _dispatch(self, session: PeerSession, frame: wire.Dispatch, now: float) -> None:
        key = RequestKey(frame.key)
        if self._find(session, key) is not None:
            # Its pages may be written to: `drained` is said when the first one ends, not now.
            self._count_refusal(FailCause.REJECTED)
            session.send(wire.Failed(key, FailCause.REJECTED, "key: in use", []))
            return
        problem = check_dispatch(frame, session, self._geometry, self._limits)
        if problem is None and key in self._work:
            problem = "key: in use by another session"
        if problem is not None:
            self._refuse(session, frame.key, FailCause.REJECTED, problem)
            return
        if self.draining:
            self._refuse(session, frame.key, FailCause.DRAINING, "this node is draining")
            return
        holders = (work.session.node for work in self._work.values())
        problem = self._places.objection(session, holders, most=self._limits.max_waiting)
        if problem is not None:
            self._refuse(session, frame.key, FailCause.OVERLOADED, problem)
            return
        push = Push(
            key,
            frame.immediate,
            len(frame.tokens),
            queued_at=now,
            drained_timeout_s=self._peer.drained_timeout_s,
            next_transfer=self.next_transfer,
        )
        destination = expand_runs(tuple(Run(run.start, run.count) for run in frame.pages))
        group = min(self._groups, key=lambda one: (self._load(one), -one.gate.pool.counts.free))
        work = PushWork(push, session, frame, group, destination, now, now, self._chunks)
        if self._digester is not None and frame.verify != Verify.OFF:
            regions = [source.region for source in group.regions]
            work.digests = SourceDigests(self._digester, regions, key, len(destination))
        session.send(wire.Accepted(frame.key, len(self._work)))
        self._work[key] = work
        self.figures.accepted += 1
        self._log(work, "transfer.accepted", "dispatch accepted", tokens=len(frame.tokens))

        def granted(pages: tuple[Run, ...]) -> None:
            work.ticket = None
            self._begin(work, pages)

        count = self._geometry.pages_for(len(frame.tokens))
        ticket = group.gate.request(count, granted, key=session.node)
        if ticket.waiting:
            work.ticket = ticket

    def _begin(self, work: PushWork, pages: tuple[Run, ...]) -> None:
        """Source pages are there: the sequence enters the schedule."""
        work.group.gate.pool.activate(pages)
        work.pages = pages
        work.source = expand_runs(pages)
        work.sequence = work.group.schedule.begin_prefill(
            tokens=work.dispatch.tokens,
            pages=pages,
            peer=work.session.node,
            priority=work.dispatch.priority,
            planned=lambda chunk, base: self._planned(work, chunk, base),
            computed=lambda chunk: self._computed(work, chunk),
        )

    def _planned(self, work: PushWork, chunk: Chunk, base: int) -> None:
        total = len(work.dispatch.tokens)
        part = chunk_pages(chunk.start, chunk.end, total, self._geometry.page_tokens)
        found = programs(
            routes(self._geometry, work.session.geometry),
            work.source[part.start : part.stop],
            work.destination[part.start : part.stop],
            chunk.number,
        )
        effects = work.push.planned(
            found, chunk=chunk.number, base=base, last=chunk.last, now=self._clock()
        )
        self._apply(work, effects)
        if work.digests is not None:
            work.digests.planned.append(found)

    def _computed(self, work: PushWork, chunk: Chunk) -> None:
        now = self._clock()
        self._chunks += 1
        work.told_at, work.told_chunks = now, self._chunks  # by `progress`
        if work.digests is not None:
            work.digests.computed(lambda frames: self._digested(work, frames))
        self._apply(work, work.push.pass_done(chunk.end, now))

    def _load(self, group: SourceGroup) -> int:
        """Prompt tokens that this group has yet to compute."""
        gated = sum(
            len(work.dispatch.tokens)
            for work in self._work.values()
            if work.group is group and work.ticket is not None
        )
        return gated + group.schedule.waiting_tokens()

    def _digested(self, work: PushWork, frames: list[wire.Sent]) -> None:
        if work.push.alive:
            for frame in frames:
                work.session.send(frame)
        self._release(work)

    def _release(self, work: PushWork) -> None:
        """Let the push hear that its transfer drained, unless digests must be sent before."""
        owed = work.digests is not None and work.digests.owed and work.push.may_finish
        if work.held is not None and not owed:
            number, work.held = work.held, None
            self._apply(work, work.push.transfer_drained(number, self._clock()))

    def _refuse(self, session: PeerSession, key: str, cause: FailCause, text: str) -> None:
        """Nothing of this key is or will be outstanding: say both at once."""
        self._count_refusal(cause)
        session.send(wire.Failed(key, cause, wire.clip(text), []))
        session.send(wire.Drained(key, 0.0, 0.0))

    def _count_refusal(self, cause: FailCause) -> None:
        self.figures.refused[cause] = self.figures.refused.get(cause, 0) + 1

    def _find(self, session: PeerSession, key: str) -> PushWork | None:
        work = self._work.get(RequestKey(key))
        return work if work is not None and work.session is session else None

    def _of(self, session: PeerSession) -> list[PushWork]:
        return [work for work in self._work.values() if work.session is session]

    def next_transfer(self) -> TransferId:
        """A number that no transfer of this node has had."""
        self._transfers += 1
        return TransferId(self._transfers)

    # inside: effects

    def _apply(self, work: PushWork, effects: list[transfer.Effect]) -> None:
        for effect in effects:
            try:
                self._carry_out(work, effect)
            except FabricError as error:
                if not isinstance(effect, transfer.Open | transfer.Submit):
                    raise
                # The core says that the peer's session or descriptors cannot take this transfer.
                opened = effect.transfer if isinstance(effect, transfer.Open) else None
                self._refused(work, str(error), not_opened=opened)
                return
        self._release(work)

    def _carry_out(self, work: PushWork, effect: transfer.Effect) -> None:
        match effect:
            case transfer.Send(frame=frame):
                if isinstance(frame, wire.Failed):
                    work.outcome = frame.cause
                    failures = self.figures.failures
                    failures[frame.cause] = failures.get(frame.cause, 0) + 1
                work.session.send(frame)
            case transfer.Open():
                self._fabric.open_transfer(effect.transfer, work.session.session, effect.immediate)
                self._by_transfer[effect.transfer] = work
                work.chunks[effect.transfer] = []
                work.shaken = False
            case transfer.Submit():
                self._submit(work, effect)
            case transfer.Finish(transfer=number):
                self._fabric.finish(number)
            case transfer.Stop(transfer=number):
                self._fabric.stop(number)
            case transfer.PairDown(pair=pair, text=text):
                self._pair_down(work.session, pair, text)
            case transfer.Unschedule():
                self._unschedule(work)
            case transfer.DropLink(text=text):
                self._drop_link(work.session, text)
            case transfer.Free():
                self._free(work)
            case _:
                raise AssertionError(f"not an effect of a push: {effect}")

    def _refused(self, work: PushWork, text: str, not_opened: TransferId | None = None) -> None:
        now = self._clock()
        if not_opened is None:
            effects = work.push.refused(text, now)
        else:
            effects = work.push.not_opened(not_opened, text, now)
        self._apply(work, effects)

    def _submit(self, work: PushWork, effect: transfer.Submit) -> None:
        here, there = self._geometry, work.session.geometry
        numbers = work.chunks[effect.transfer]
        first_rank = work.dispatch.group * there.tp
        for program in effect.programs:
            source = work.group.regions[program.source_rank]
            rank = first_rank + program.destination_rank
            carrier = self._devices.carrier(source.group, work.session.reaching(rank))
            if carrier is None:
                carrier, work.shaken = source.group, True  # the core says that there is no way
            self.figures.detours += carrier != source.group
            numbers.append(effect.chunk)
            self._fabric.submit(
                effect.transfer,
                -1 if effect.base is None else source.counter,
                effect.base or 0,
                here.layers,
                source.region,
                here.layer_stride,
                here.page_bytes,
                program.source_offset,
                rank,
                there.layer_stride,
                there.page_bytes,
                program.destination_offset,
                program.length,
                program.whole_page,
                program.spans,
                carrier,
            )

    def _pair_down(self, session: PeerSession, pair: transfer.Pair, text: str) -> None:
        here = _turned(pair)
        if here not in session.pairs and (session.session, pair) in self._down:
            return  # told already
        self._close_pair(session, pair)
        session.send(wire.NicDown(pair, wire.clip(text)))

    def _nic_fenced(self, session: PeerSession, pair: transfer.Pair, now: float) -> None:
        if _turned(pair) in session.pairs:  # fenced there by its own will
            self._close_pair(session, pair)
        elif (session.session, pair) not in self._down:
            return  # none of this session
        for work in self._of(session):
            self._apply(work, work.push.nic_fenced(pair, now))

    def _close_pair(self, session: PeerSession, pair: transfer.Pair) -> None:
        here = _turned(pair)
        self._down.add((session.session, pair))
        session.pairs = tuple(other for other in session.pairs if other != here)
        for work in self._of(session):
            work.shaken = True
        self._fabric.fence(session.session, here)

    def _unschedule(self, work: PushWork) -> None:
        if work.ticket is not None:
            work.ticket.cancel()
            work.ticket = None
            work.group.gate.pump()
        if work.sequence is not None:
            work.group.schedule.remove(work.sequence)

    def _free(self, work: PushWork) -> None:
        del self._work[work.push.key]
        size_bytes = 0
        for number, chunks in work.chunks.items():
            del self._by_transfer[number]
            for batch, layer, raised, posted, done, size, writes in self._fabric.close_transfer(
                number
            ):
                work.layers.append(
                    LayerTimes(chunks[batch], layer, raised, posted, done, size, writes)
                )
                size_bytes += size
        self.figures.add_bytes(work.session.node, size_bytes)
        if work.outcome == "drained":
            self.figures.drained += 1
        record = work.record(self._clock())
        self._records.add_transfer(record)
        self._log(
            work, "transfer.ended", "transfer ended",
            outcome=record.outcome, bytes=record.bytes, total_s=record.total_s,
        )  # fmt: skip
        if work.pages:
            work.group.gate.release(work.pages, key=work.session.node)

    def _log(self, work: PushWork, code: str, text: str, **fields: str | int | float) -> None:
        dispatch = work.dispatch
        event(
            _log, logging.DEBUG, code, text, req=wire.clip(dispatch.request_id),
            peer=work.session.node, trace_id=trace_id(dispatch.traceparent), **fields,
        )  # fmt: skip


def _turned(pair: tuple[int, int]) -> tuple[int, int]:
    """(local, remote) of this node ↔ (decode, prefill) of the wire."""
    return pair[1], pair[0]
