"""`Push`: the prefill node's side of one dispatch. Rule, vocabulary and effects: core/transfer.py.

Every (state, input) pair has an answer; inputs that have lost their meaning return nothing.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pdnode.core import wire
from pdnode.core.plan import Program
from pdnode.core.transfer import (
    DropLink,
    Effect,
    FailCause,
    Finish,
    Free,
    Open,
    Pair,
    PairDown,
    Send,
    Stop,
    Submit,
    Unschedule,
)
from pdnode.types import RequestKey, TransferId


class PushState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"  # chunks are being computed
    COMPUTED = "computed"  # all computed; writes may be outstanding
    REPLAY = "replay"  # a NIC failed: regrant or quiet is awaited, computing goes on
    CANCELLING = "cancelling"  # the decode node wants no more of it
    FAILED = "failed"  # we gave up and said so
    LOST = "lost"  # the link is gone: nobody to tell
    DONE = "done"


_ALIVE = (PushState.QUEUED, PushState.RUNNING, PushState.COMPUTED, PushState.REPLAY)


class _AttemptState(StrEnum):
    OPEN = "open"
    DRAINED = "drained"  # all came back, with success
    FAILED = "failed"  # some came back with an error, others are outstanding
    SETTLED = "settled"  # all came back


@dataclass(slots=True)
class _Attempt:
    """One transfer of the core: the first one, or a replay.

    `errors`: pairs over which its writes failed; they may land until the decode node has fenced
    the pair. `fenced`: pairs of which it said so since the attempt began. A pair that comes back
    later is no part of it: regrant or cancel have stopped the attempt before that.
    """

    transfer: TransferId
    state: _AttemptState = _AttemptState.OPEN
    stopped: bool = False
    errors: set[Pair] = field(default_factory=set)
    fenced: set[Pair] = field(default_factory=set)

    @property
    def unfenced(self) -> set[Pair]:
        return self.errors - self.fenced

    @property
    def local_quiet(self) -> bool:
        """Nothing of it reads our source pages any more."""
        return self.state in (_AttemptState.DRAINED, _AttemptState.SETTLED)

    @property
    def quiet(self) -> bool:
        """Nothing of it can land any more."""
        return self.local_quiet and not self.unfenced


@dataclass(slots=True)
class _Batch:
    """Programs of one chunk; `base` None once its pass is done."""

    chunk: int
    base: int | None
    programs: tuple[Program, ...]


@dataclass(slots=True)
class Push:
    """Source pages, layer programs and the `drained` that is owed.

    `next_transfer` gives a fresh number. Source pages are held while a pass computes into them, a
    write may read them, or a replay may need them. At most one transfer is not quiet at a time.
    """

    key: RequestKey
    immediate: int
    total_tokens: int  # prompt − 1
    queued_at: float
    drained_timeout_s: float
    next_transfer: Callable[[], TransferId]
    state: PushState = PushState.QUEUED
    computed_tokens: int = 0
    planned_all: bool = False
    in_pass: bool = False
    regrant_due: bool = False  # in REPLAY: the decode node has yet to say under what immediate
    told: bool = False  # `drained` was said; only a pass keeps the pages
    started_at: float | None = None
    computed_at: float | None = None
    owed_since: float | None = None  # since when a regrant or nic_fenced is owed
    link_dropped: bool = False
    attempt: _Attempt | None = None
    batches: list[_Batch] = field(default_factory=list)

    @property
    def computed_all(self) -> bool:
        return self.computed_tokens == self.total_tokens

    @property
    def alive(self) -> bool:
        """It has neither ended nor been given up, by either side."""
        return self.state in _ALIVE

    @property
    def waits(self) -> bool:
        """For pages or for its turn: no pass computes its next tokens."""
        return self.alive and not self.in_pass and not self.computed_all

    @property
    def may_finish(self) -> bool:
        """Whether the transfer that is open now may be the one that ends it with success."""
        return self.alive and self.attempt is not None and not self.attempt.stopped

    @property
    def queue_s(self) -> float:
        return 0.0 if self.started_at is None else self.started_at - self.queued_at

    def prefill_s(self, now: float) -> float:
        if self.started_at is None:
            return 0.0
        return (now if self.computed_at is None else self.computed_at) - self.started_at

    # what the scheduler does

    def planned(
        self, programs: tuple[Program, ...], *, chunk: int, base: int, last: bool, now: float
    ) -> list[Effect]:
        """A chunk is about to run in a pass that starts at layer count `base`."""
        assert self.state in (PushState.QUEUED, PushState.RUNNING, PushState.REPLAY), self.state
        assert not self.in_pass
        assert not self.planned_all
        self.in_pass = True
        self.planned_all = last
        self.batches.append(_Batch(chunk, base, programs))
        if self.started_at is None:
            self.started_at = now
        if self.state is PushState.REPLAY:
            return []
        effects: list[Effect] = []
        if self.state is PushState.QUEUED:
            self.state = PushState.RUNNING
            effects.append(self._open())
        assert self.attempt is not None
        transfer = self.attempt.transfer
        effects.append(Submit(transfer, chunk, base, programs))
        if last:
            effects.append(Finish(transfer))
        return effects

    def pass_done(self, computed_tokens: int, now: float) -> list[Effect]:
        """The pass that computed our chunk came back from the worker."""
        if not self.in_pass:
            # engine_failed did not wait for it, and it came all the same.
            assert self.state not in _ALIVE, "no pass runs it"
            return []
        self.in_pass = False
        self.batches[-1].base = None
        self.computed_tokens = computed_tokens
        if self.computed_all:
            self.computed_at = now
            if self.state is PushState.RUNNING:
                self.state = PushState.COMPUTED
        if self.state in _ALIVE:
            frame = wire.Progress(self.key, computed_tokens, self.queue_s, self.prefill_s(now))
            return [Send(frame), *self._settle(now)]
        return self._settle(now)

    def engine_failed(self, text: str, now: float) -> list[Effect]:
        """The worker died: the pass, if any, will not come back."""
        self.in_pass = False
        if self.state in _ALIVE:
            return self._fail(FailCause.ENGINE, text, (), now)
        return self._settle(now)

    # what the peer says

    def cancel(self, now: float) -> list[Effect]:
        if self.state not in _ALIVE:
            return []
        self.state = PushState.CANCELLING
        return [Unschedule(), *self._stop(), *self._settle(now)]

    def regrant(self, immediate: int, now: float) -> list[Effect]:
        """Replay every write under a new immediate, once the old ones cannot land any more."""
        if self.state not in _ALIVE:
            return []
        self.immediate = immediate
        if self.state is PushState.QUEUED:
            return []
        assert self.attempt is not None
        self.state = PushState.REPLAY
        # What failed over a pair that is not fenced yet will bring another regrant after its fence.
        self.regrant_due = bool(self.attempt.unfenced)
        return [*self._stop(), *self._settle(now)]

    def nic_fenced(self, pair: Pair, now: float) -> list[Effect]:
        """The decode node has fenced this pair: what failed over it cannot land any more."""
        if self.attempt is not None:
            self.attempt.fenced.add(pair)
        return self._settle(now)

    # what the fabric says

    def transfer_drained(self, transfer: TransferId, now: float) -> list[Effect]:
        attempt = self._attempt(transfer, _AttemptState.OPEN)
        assert attempt.stopped or self.planned_all, "drained follows finish or stop"
        attempt.state = _AttemptState.DRAINED
        return self._settle(now)

    def transfer_failed(
        self,
        transfer: TransferId,
        pairs: Iterable[Pair],
        *,
        text: str,
        live: Collection[Pair],
        now: float,
        stranded: bool = False,
    ) -> list[Effect]:
        """Writes came back with an error, or could not be posted (no `pairs`).

        `live`: pairs of the session. `stranded`: there was no way for them over any of these, but
        the decode node knows of a lost pair, and regrants.
        """
        attempt = self._attempt(transfer, _AttemptState.OPEN)
        attempt.state = _AttemptState.FAILED
        found = set(pairs)
        if self.state in _ALIVE:
            if not found and self.state is PushState.REPLAY:
                return self._settle(now)  # another attempt follows, which has its own fate
            if not found and not (stranded and live):
                return self._fail(FailCause.WRITE, text, (), now)
            # Where regrant has come already, what failed over fenced pairs asks for no other one.
            self.regrant_due = self.regrant_due or self.state is not PushState.REPLAY
            self.state = PushState.REPLAY
        return self._errors(attempt, found, text, live=live, now=now)

    def transfer_settled(
        self,
        transfer: TransferId,
        pairs: Iterable[Pair],
        *,
        text: str,
        live: Collection[Pair],
        now: float,
    ) -> list[Effect]:
        """After transfer_failed: no write is outstanding any more; `pairs`: all that had errors."""
        attempt = self._attempt(transfer, _AttemptState.FAILED)
        attempt.state = _AttemptState.SETTLED
        return self._errors(attempt, set(pairs), text, live=live, now=now)

    def not_opened(self, transfer: TransferId, text: str, now: float) -> list[Effect]:
        """The core refused to open this transfer, so it will never speak of it."""
        assert self.state in (PushState.RUNNING, PushState.COMPUTED), "asked for just now"
        self._attempt(transfer, _AttemptState.OPEN).state = _AttemptState.DRAINED
        return self._fail(FailCause.WRITE, text, (), now)

    def refused(self, text: str, now: float) -> list[Effect]:
        """The core, or a check, would not take what the peer asked for."""
        return self._fail(FailCause.WRITE, text, (), now) if self.state in _ALIVE else []

    def session_lost(self, now: float) -> list[Effect]:
        """The link is gone; our connections are being closed. Pages go when the writes are back."""
        if self.state in (PushState.LOST, PushState.DONE):
            return []
        self.state = PushState.LOST
        return [Unschedule(), *self._stop(), *self._settle(now)]

    def tick(self, now: float) -> list[Effect]:
        """Deadlines. Call about twice a second."""
        if self.owed_since is None or self.link_dropped:
            return []
        if now - self.owed_since > self.drained_timeout_s:
            self.link_dropped = True
            text = f"{self.key}: no answer to nic_down within {self.drained_timeout_s:g} s"
            return [DropLink(text)]
        return []

    # inside

    def _attempt(self, transfer: TransferId, state: _AttemptState) -> _Attempt:
        """The only attempt that the core can still speak of (older ones are quiet), in `state`."""
        assert self.attempt is not None, "no transfer is open"
        assert self.attempt.transfer == transfer
        assert self.attempt.state is state, f"the transfer is {self.attempt.state}"
        return self.attempt

    def _open(self) -> Effect:
        assert self.attempt is None or self.attempt.quiet
        self.attempt = _Attempt(self.next_transfer())
        return Open(self.attempt.transfer, self.immediate)

    def _stop(self) -> list[Effect]:
        attempt = self.attempt
        if attempt is None or attempt.stopped or attempt.state is not _AttemptState.OPEN:
            return []
        attempt.stopped = True
        return [Stop(attempt.transfer)]

    def _fail(
        self, cause: FailCause, text: str, pairs: tuple[Pair, ...], now: float
    ) -> list[Effect]:
        self.state = PushState.FAILED
        failed = wire.Failed(self.key, cause, wire.clip(text), list(pairs))
        return [Send(failed), Unschedule(), *self._stop(), *self._settle(now)]

    def _errors(
        self,
        attempt: _Attempt,
        pairs: set[Pair],
        text: str,
        *,
        live: Collection[Pair],
        now: float,
    ) -> list[Effect]:
        """Have the decode node fence every pair that failed: until then its writes may land."""
        # A pair whose failure was told left the session; one that is there again has come back.
        others = any(pair not in pairs or pair in attempt.errors for pair in live)
        before = attempt.unfenced
        attempt.errors |= pairs
        new = tuple(sorted(attempt.unfenced - before))
        if not new or self.state is PushState.LOST:
            return self._settle(now)
        if others:
            self.regrant_due = self.state is PushState.REPLAY
            return [*(PairDown(pair, text) for pair in new), *self._settle(now)]
        if self.state in _ALIVE:
            return self._fail(FailCause.WRITE, text, new, now)
        failed = wire.Failed(self.key, FailCause.WRITE, wire.clip(text), list(new))
        return [Send(failed), *self._settle(now)]

    def _settle(self, now: float) -> list[Effect]:
        """Whatever is possible now: replay, say `drained`, free. Called after every change."""
        attempt = self.attempt
        quiet = attempt is None or attempt.quiet
        effects: list[Effect] = []
        if self.state is PushState.LOST:
            if not self.in_pass and (attempt is None or attempt.local_quiet):
                effects = self._done()
        elif self.state is PushState.REPLAY:
            if quiet and not self.regrant_due:
                effects = self._replay()
        elif self.state is PushState.COMPUTED:
            # Not stopped, so it drained because it was finished.
            if attempt is not None and attempt.state is _AttemptState.DRAINED:
                effects = [*self._tell(now), *self._done()]
        elif self.state in (PushState.CANCELLING, PushState.FAILED) and quiet:
            effects = [] if self.told else self._tell(now)
            if not self.in_pass:
                effects += self._done()
        self._watch(now)
        return effects

    def _watch(self, now: float) -> None:
        """Note since when the decode node owes an answer."""
        unfenced = self.attempt is not None and bool(self.attempt.unfenced)
        due = self.state is PushState.REPLAY and self.regrant_due
        over = self.state in (PushState.LOST, PushState.DONE)
        if over or not (unfenced or due):
            self.owed_since = None
        elif self.owed_since is None:
            self.owed_since = now

    def _replay(self) -> list[Effect]:
        self.state = PushState.COMPUTED if self.computed_all else PushState.RUNNING
        opened = self._open()
        assert self.attempt is not None
        transfer = self.attempt.transfer
        submits = [Submit(transfer, b.chunk, b.base, b.programs) for b in self.batches]
        return [opened, *submits, *([Finish(transfer)] if self.planned_all else [])]

    def _tell(self, now: float) -> list[Effect]:
        self.told = True
        return [Send(wire.Drained(self.key, self.queue_s, self.prefill_s(now)))]

    def _done(self) -> list[Effect]:
        self.state = PushState.DONE
        self.batches.clear()
        return [Free()]
