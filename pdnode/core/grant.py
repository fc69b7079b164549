"""`Grant`: the decode node's side of one dispatch. Rule, vocabulary and effects: core/transfer.py.

Every (state, input) pair has an answer; inputs that have lost their meaning return nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pdnode.core import wire
from pdnode.core.slots import Slot
from pdnode.core.transfer import (
    DropLink,
    Effect,
    Enter,
    FailCause,
    FencePairs,
    Free,
    Lost,
    Pair,
    Quarantine,
    Send,
)
from pdnode.types import RequestKey


class GrantState(StrEnum):
    RESERVED = "reserved"  # pages and slot held, nothing told to anyone
    DISPATCHED = "dispatched"  # the peer may write
    COMPLETE = "complete"  # the count was reached; the sequence reads (or has read) the pages
    FAILED = "failed"  # the peer gave up or is lost
    CANCELLING = "cancelling"  # we gave up and told the peer
    FREE = "free"


@dataclass(slots=True)
class Grant:
    """Pages and immediates granted to one session of one peer.

    `drained`: nothing of this grant can land any more (the peer said so, or it is fenced).
    `reading`: the sequence is in the schedule. Pages are free when both are over.
    """

    key: RequestKey
    slot: Slot  # the current immediate
    request_stall_s: float
    drained_timeout_s: float
    state: GrantState = GrantState.RESERVED
    drained: bool = False
    reading: bool = False
    old_slots: list[Slot] = field(default_factory=list)
    old_reached: bool = False  # all writes under one of the old slots landed
    position: int = -1
    computed_tokens: int = 0
    landed_units: int = 0  # under the current immediate, when they were looked at last
    progress_at: float = 0.0
    owed_since: float | None = None  # since when `drained` is owed, with nothing else to wait for
    link_dropped: bool = False

    @property
    def slots(self) -> list[Slot]:
        """Every slot to give back with Free. All of them stay armed until then."""
        return [*self.old_slots, self.slot]

    @property
    def wants_slot(self) -> bool:
        """Whether `pair_fenced` would use a fresh slot: the pages are still being written."""
        return self.state is GrantState.DISPATCHED and not self.drained

    # what this node does

    def dispatched(self, now: float) -> list[Effect]:
        """`dispatch` was sent: from here on the peer may write."""
        assert self.state is GrantState.RESERVED
        self.state = GrantState.DISPATCHED
        self.progress_at = now
        return []

    def cancel(self, now: float) -> list[Effect]:
        """The request ended before its pages were complete (client, deadline, shutdown)."""
        if self.state is GrantState.RESERVED:
            return self._free()
        if self.state is GrantState.DISPATCHED:
            return self._give_up(now)
        return []

    def end(self, now: float) -> list[Effect]:
        """The sequence has left the schedule for good: nobody reads the pages any more."""
        if not self.reading:
            return []
        self.reading = False
        if self.drained:
            return self._free()
        return [Quarantine()]

    def tick(self, now: float) -> list[Effect]:
        """Deadlines. Call about twice a second."""
        if self.state is GrantState.DISPATCHED:
            if self.drained and now - self.progress_at > self.drained_timeout_s:
                return self._lose(FailCause.SHORT, "drained, but immediates are missing", now)
            if now - self.progress_at > self.request_stall_s:
                text = f"no progress for {self.request_stall_s:g} s"
                return self._lose(FailCause.STALLED, text, now)
        if self.owed_since is None or self.drained or self.link_dropped:
            return []
        if now - self.owed_since > self.drained_timeout_s:
            self.link_dropped = True
            return [DropLink(f"{self.key}: no drained within {self.drained_timeout_s:g} s")]
        return []

    def pair_fenced(self, slot: Slot | None, now: float) -> list[Effect]:
        """A connection of the session was fenced, and the peer has been told so.

        Writes over it may be missing for ever, so the peer replays all under a fresh immediate. The
        old slot stays ours: late immediates must find no new owner, and its count may still be
        the one that matters (`drain_done`). `slot`: if `wants_slot`; None then: none is left.
        """
        assert slot is None or self.wants_slot
        if self.state is GrantState.COMPLETE and not self.drained:
            # The peer may have seen a write fail that did land. It waits for a regrant: release it.
            return [Send(wire.Cancel(self.key))]
        if not self.wants_slot:
            return []
        if slot is None:
            return self._lose(FailCause.OVERLOADED, "no immediate left for a replay", now)
        self.old_slots.append(self.slot)
        self.slot = slot
        self.landed_units = 0
        self.progress_at = now
        return [Send(wire.Regrant(self.key, slot.immediate))]

    # what the peer says

    def accepted(self, position: int, now: float) -> list[Effect]:
        """Queued there. Comes again while the queue moves, which counts as progress."""
        if self.state is GrantState.DISPATCHED:
            self.position = position
            self.progress_at = now
        return []

    def progress(self, computed_tokens: int, now: float) -> list[Effect]:
        if self.state is GrantState.DISPATCHED and computed_tokens > self.computed_tokens:
            self.computed_tokens = computed_tokens
            self.progress_at = now
        return []

    def failed(
        self, cause: FailCause, text: str, pairs: Iterable[Pair], now: float
    ) -> list[Effect]:
        """The peer gave up. After COMPLETE it is only a matter of fencing: the count was exact.

        After `drained` it is the answer to a regrant that crossed it: the count still decides.
        """
        if self.state in (GrantState.RESERVED, GrantState.FREE):
            return []
        named = tuple(pairs)
        effects: list[Effect] = [FencePairs(named)] if named else []
        if self.state is GrantState.DISPATCHED and not self.drained:
            effects.append(Lost(cause, text, retry=True))
            effects += self._wait(GrantState.FAILED, now)
        return effects

    def drain_done(self, now: float) -> list[Effect]:
        """The peer said `drained`."""
        if self.state in (GrantState.RESERVED, GrantState.FREE) or self.drained:
            return []
        self.drained = True
        if self.state is GrantState.DISPATCHED:
            # The last immediates may still be on their way to our counter: link and fabric
            # have no common order. The count decides, tick() bounds the wait.
            self.progress_at = now
            return self._complete(now) if self.old_reached else []
        return [] if self.reading else self._free()

    # what the fabric says

    def landed(self, units: int, now: float) -> list[Effect]:
        """So many page units were counted under the current immediate. More than at the last look
        is progress: a long pass, or a slow wire, is not a stalled peer.
        """
        if self.state is GrantState.DISPATCHED and units > self.landed_units:
            self.landed_units = units
            self.progress_at = now
        return []

    def reached(self, slot: Slot, now: float) -> list[Effect]:
        """The expected count is there for `slot`.

        For an old slot it means that all bytes are here, but a replay may be writing them again:
        they may be read only once nothing can land any more.
        """
        if self.state is not GrantState.DISPATCHED:
            return []
        if slot == self.slot:
            return self._complete(now)
        if slot in self.old_slots:
            self.old_reached = True
            return self._complete(now) if self.drained else []
        return []

    def overshoot(self, slot: Slot, now: float) -> list[Effect]:
        """More immediates than the plan allows."""
        text = "more page writes arrived than were planned"
        return self.distrust(slot, FailCause.OVERSHOOT, text, now)

    def distrust(self, slot: Slot, cause: FailCause, text: str, now: float) -> list[Effect]:
        """What was written under this immediate cannot be trusted."""
        if slot not in self.slots:
            return []
        if self.state is GrantState.DISPATCHED:
            return self._lose(cause, text, now)
        if self.reading:
            return [Lost(cause, text, retry=False)]
        return []

    def session_lost(self, text: str, now: float, *, silent: bool = False) -> list[Effect]:
        """The link is gone. What is complete stays complete: its bytes are here."""
        self.link_dropped = True
        lost = Lost(FailCause.SILENT if silent else FailCause.LINK_LOST, text, retry=True)
        if self.state is GrantState.RESERVED:
            return [lost, *self._free()]
        if self.state is GrantState.DISPATCHED:
            return [lost, *self._wait(GrantState.FAILED, now)]
        return []

    def session_fenced(self) -> list[Effect]:
        """After session_lost: no byte of the peer can land any more."""
        assert self.state not in (GrantState.RESERVED, GrantState.DISPATCHED), "fenced before lost"
        if self.state is GrantState.FREE:
            return []
        self.drained = True
        return [] if self.reading else self._free()

    # inside

    def _complete(self, now: float) -> list[Effect]:
        self.state = GrantState.COMPLETE
        self.reading = True
        self.owed_since = None if self.drained else now
        return [Enter()]

    def _lose(self, cause: FailCause, text: str, now: float) -> list[Effect]:
        return [Lost(cause, text, retry=True), *self._give_up(now)]

    def _give_up(self, now: float) -> list[Effect]:
        """Leave DISPATCHED by our own will: the peer must hear of it, unless it is done anyway."""
        tell: list[Effect] = [] if self.drained else [Send(wire.Cancel(self.key))]
        return [*tell, *self._wait(GrantState.CANCELLING, now)]

    def _wait(self, state: GrantState, now: float) -> list[Effect]:
        self.state = state
        if self.drained:
            return self._free()
        self.owed_since = now
        return [Quarantine()]

    def _free(self) -> list[Effect]:
        assert not self.reading
        self.state = GrantState.FREE
        self.owed_since = None
        return [Free()]
