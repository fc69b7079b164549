"""Requests in, tokens out: admission, choice of the prefill, fall-back, release of pages.

Each admitted request is one task until its sequence is in the schedule; from then on the step loop
drives it. Whatever happens, the pages of a request are given back by exactly one of: the gate's
cancelled wait, the pull's grant, or the local release.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pdnode.core import schedule, wire
from pdnode.core.request import Request
from pdnode.core.transfer import FailCause
from pdnode.daemon.flight import Flight, Times
from pdnode.daemon.steps import StepLoop
from pdnode.errors import BadRequest, Cause, Corrupted, PrefillLost, QueueFull, Stalled, Unavailable
from pdnode.messenger.gate import PageGate
from pdnode.messenger.pull import Outcome, PullMessenger
from pdnode.messenger.session import PeerSession
from pdnode.obs.faults import report
from pdnode.obs.log import event
from pdnode.obs.records import Records
from pdnode.obs.trace import trace_id
from pdnode.obs.warnings import REGISTRY, Condition
from pdnode.types import NodeId, Role, Run, SessionId, WhenNoPrefill

_log = logging.getLogger(__name__)
MAX_ATTEMPTS = 3
"""Dispatches for one request, over all peers, before the policy decides."""


class Peers(Protocol):
    """The peer manager as the service needs it."""

    def usable_prefills(self) -> Iterable[PeerSession]: ...


class Group(Protocol):
    """A TP group: its pages, and the step loop over them. Sequences stay in their group."""

    @property
    def gate(self) -> PageGate: ...
    @property
    def steps(self) -> StepLoop: ...


class NodeService:
    """Implements api.service.Service for every role. Built before the model is loaded."""

    def __init__(
        self,
        *,
        role: Role,
        policy: WhenNoPrefill,
        model_name: str,
        context_tokens: int,
        vocabulary: int,
        max_waiting: int,
        records: Records,
        clock: Callable[[], float],
    ) -> None:
        self._role = role
        self._policy = policy
        self._model_name = model_name
        self._context_tokens = context_tokens
        self._vocabulary = vocabulary
        self.max_waiting = max_waiting
        self._records = records
        self._clock = clock
        self._groups: Sequence[Group] = ()
        self._loads: list[int] = []  # by group: tokens that its open requests may come to
        self._peers: Peers | None = None
        self._pulls: PullMessenger | None = None
        self._flights: dict[Flight, None] = {}  # in the order in which they came
        self._turn = 0
        self._dead: str | None = None
        self.local_prefills: Counter[str] = Counter()  # on a decode node, by reason
        self.most_waiting = 0  # at a time, since start
        self.rejected = 0  # because the queue was full
        self.recomputed = 0  # prompts sent to another peer, or run here, after a failure
        self.draining = False
        self.loading = "starting"
        self.lost = ""  # why the engine is gone, while another one comes

    def start(
        self,
        *,
        groups: Sequence[Group],
        peers: Peers | None = None,
        pulls: PullMessenger | None = None,
    ) -> None:
        """The model is loaded. `peers` and `pulls` on a decode node."""
        self._groups, self._peers, self._pulls = groups, peers, pulls
        self._loads = [0] * len(groups)
        self.loading = self.lost = ""

    def change_role(self, role: Role) -> None:
        """Nothing is open here; `start` follows."""
        assert not self._flights
        self._role, self._peers, self._pulls = role, None, None

    # api.service.Service

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def capacity_tokens(self) -> int:
        """Of one group: a request does not spread over several."""
        if not self._groups:
            return 0
        return sum(self._groups[0].gate.pool.counts) * self._groups[0].steps.page_tokens

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    def role(self) -> str:
        return self._role

    def may_generate(self) -> bool:
        return self._role is not Role.PREFILL

    def alive(self) -> bool:
        return self._dead is None

    def conditions(self) -> list[Condition]:
        """What the warnings registry asks of the service."""
        found = []
        if self._dead is not None:
            found.append(Condition("E101", self._dead))
        elif self.lost:
            found.append(Condition("W105", f"{self.lost}; another one is started: {self.loading}"))
        elif self.loading:
            found.append(Condition("W101", f"loading: {self.loading}"))
        elif self._role is Role.DECODE and not self._usable():
            if self._refuses():
                text = "no usable prefill peer, and when_no_prefill is refuse"
                found.append(Condition("W103", text))
            else:
                found.append(Condition("W104", "no usable prefill peer: prompts run here"))
        if self.draining:
            found.append(Condition("W102", "draining"))
        return found

    def not_ready(self) -> list[str]:
        return [text for code, text, _ in self.conditions() if REGISTRY[code].affects_readiness]

    async def submit(self, request: Request) -> Flight:
        reasons = self.not_ready()
        if reasons:
            raise Unavailable(reasons[0])
        if self.waiting >= self.max_waiting:
            self.rejected += 1
            raise QueueFull(f"{self.waiting} requests wait, at most {self.max_waiting} may")
        tokens = len(request.prompt) + request.max_tokens
        if tokens > self.capacity_tokens:
            there = self.capacity_tokens
            text = f"prompt and max_tokens need {tokens} tokens of KV cache, {there} are there"
            raise BadRequest(text, param="max_tokens")
        if request.score_prompt and len(request.prompt) > 1 and self._refuses():
            text = "with logprobs it needs the prompt's logits, which stay on the prefill node"
            raise BadRequest(
                f"echo: {text}, and when_no_prefill is refuse; allowed: echo or logprobs", "echo"
            )
        if self._refuses() and len(request.prompt) - 1 > (most := self._most_anywhere()):
            text = f"prompt: {len(request.prompt)} tokens, the prefill nodes take {most + 1}"
            raise BadRequest(text, "prompt", "context_length_exceeded")
        flight = Flight(
            request,
            self._clock,
            Times(self._clock()),
            on_end=self._on_end,
            group=min(range(len(self._groups)), key=self._loads.__getitem__),
        )
        self._flights[flight] = None
        self._loads[flight.group] += tokens
        self.most_waiting = max(self.most_waiting, self.waiting)
        event(
            _log, logging.DEBUG, "request.admitted", "request admitted",
            req=request.request_id, prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens, trace_id=trace_id(request.traceparent),
        )  # fmt: skip
        flight.task = asyncio.get_running_loop().create_task(self._place(flight))
        return flight

    # what the daemon asks

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return sum(flight.generated == 0 for flight in self._flights)

    @property
    def running(self) -> int:
        return len(self._flights) - self.waiting

    @property
    def open_requests(self) -> int:
        return len(self._flights)

    def flights(self) -> list[Flight]:
        """Requests that are not over, oldest first."""
        return sorted(self._flights, key=lambda flight: flight.times.submitted)

    def fail_all(self, cause: Cause) -> None:
        for flight in list(self._flights):
            flight.fail(cause)

    def engine_died(self, text: str, *, fatal: bool) -> None:
        """Every request ends with an error. Unless `fatal`, `start` comes again."""
        if fatal:
            self._dead = text
        else:
            self.lost, self.loading = text, "waiting"
        self.fail_all(Cause(text))

    # inside: where the prompt is computed

    async def _place(self, flight: Flight) -> None:
        try:
            remote = self._role is Role.DECODE and len(flight.request.prompt) > 1
            if remote and flight.request.score_prompt:
                self.local_prefills["scored_prompt"] += 1
                remote = False
            if remote:
                await self._place_remote(flight)
            else:
                self._start_local(flight, await self._reserve(flight))
        except Cause as cause:
            flight.fail(cause)
        except Exception as error:  # noqa: BLE001 - the client must hear of it, and not only it
            flight.fail(Cause("internal error"))
            report(error, "placing a request failed")

    async def _reserve(self, flight: Flight) -> tuple[Run, ...]:
        group, request = self._groups[flight.group], flight.request
        # The last token generated is never run, so its KV needs no place.
        tokens = len(request.prompt) + request.max_tokens - 1
        return await group.gate.reserve(-(-tokens // group.steps.page_tokens))

    async def _place_remote(self, flight: Flight) -> None:
        """One prefill peer after the other, then the policy."""
        gate, tokens = self._groups[flight.group].gate, len(flight.request.prompt) - 1
        tried: set[SessionId] = set()
        last: Cause = Unavailable("no usable prefill peer, and when_no_prefill is refuse")
        while True:
            if self._refuses() and not self._untried(tried, tokens):
                raise last  # now: pages may be long in coming
            pages = await self._reserve(flight)
            dispatchable = len(pages) <= wire.MAX_RUNS
            session = self._choose(tried, tokens) if dispatchable else None
            self.recomputed += bool(tried)
            if session is None:
                if self._policy is WhenNoPrefill.LOCAL:
                    self.local_prefills["retry" if tried else "no_peer"] += 1
                    self._start_local(flight, pages)
                    return
                gate.release(pages)
                raise last
            tried.add(session.session)
            outcome = await self._pull(flight, session, pages)
            if outcome is None:
                continue
            if outcome.complete:
                return
            last = _cause(outcome, session.node)
            if outcome.cause is FailCause.CORRUPT:
                raise last  # a fault to be found, not to be covered up

    async def _pull(
        self, flight: Flight, session: PeerSession, pages: tuple[Run, ...]
    ) -> Outcome | None:
        """One attempt at one peer; None if it was gone before the dispatch."""
        assert self._pulls is not None
        gate = self._groups[flight.group].gate
        try:
            slot = await self._pulls.take_slot()
        except asyncio.CancelledError:
            gate.release(pages)
            raise
        if not session.up or session.draining:
            self._pulls.return_slot(slot)
            gate.release(pages)
            return None
        flight.prefill = session.node
        flight.times.begun = self._clock()
        pull = self._pulls.begin(
            session,
            request_id=flight.request.request_id,
            prompt=flight.request.prompt,
            pages=pages,
            slot=slot,
            priority=flight.request.priority,
            traceparent=flight.request.traceparent,
            group=flight.group,
        )
        try:
            outcome = await pull.outcome
        except asyncio.CancelledError:
            self._pulls.abandon(pull)
            raise
        if outcome.complete:
            if not pull.readable:  # lost between the event and this task's turn
                return Outcome(complete=False, cause=FailCause.OVERSHOOT, text="pages were lost")
            flight.pull = pull
            flight.times.complete = pull.complete_at
            pull.broken = lambda text: flight.fail(PrefillLost(text))
            pulls = self._pulls
            self._start(
                flight,
                pages,
                computed=len(flight.request.prompt) - 1,
                release=lambda: pulls.end(pull),
            )
        return outcome

    def _untried(self, tried: set[SessionId], tokens: int) -> list[PeerSession]:
        """Usable peers that may be asked for the KV of so many tokens."""
        if len(tried) >= MAX_ATTEMPTS:
            return []
        return [
            session
            for session in self._usable()
            if session.session not in tried and tokens <= self._most_tokens(session)
        ]

    def _choose(self, tried: set[SessionId], tokens: int) -> PeerSession | None:
        """The one of them with the fewest outstanding prompt tokens; ties in turn."""
        assert self._pulls is not None
        found = self._untried(tried, tokens)
        if not found:
            return None
        self._turn += 1
        turned = found[self._turn % len(found) :] + found[: self._turn % len(found)]
        pulls = self._pulls
        return min(turned, key=lambda session: pulls.outstanding_tokens(NodeId(session.node)))

    def _most_tokens(self, session: PeerSession) -> int:
        """That this prefill can ever compute, or be asked for."""
        geometry = session.geometry
        held = geometry.pages * geometry.page_tokens
        return min(session.hello.context_tokens, held, wire.most_tokens(self._vocabulary))

    def _refuses(self) -> bool:
        return self._role is Role.DECODE and self._policy is WhenNoPrefill.REFUSE

    def _most_anywhere(self) -> int:
        """At one of the usable prefill nodes, of which there is one."""
        return max(map(self._most_tokens, self._usable()))

    def _usable(self) -> list[PeerSession]:
        if self._peers is None:
            return []
        return [session for session in self._peers.usable_prefills() if not session.draining]

    def _start_local(self, flight: Flight, pages: tuple[Run, ...]) -> None:
        gate = self._groups[flight.group].gate
        flight.prefill = "local"
        flight.times.begun = self._clock()
        gate.pool.activate(pages)
        self._start(flight, pages, computed=0, release=lambda: gate.release(pages))

    def _start(
        self,
        flight: Flight,
        pages: tuple[Run, ...],
        *,
        computed: int,
        release: Callable[[], None],
    ) -> None:
        """The sequence enters the schedule; `release` gives its pages back once it has left."""
        steps = self._groups[flight.group].steps
        sequence = schedule.Sequence(
            sequence=steps.next_sequence(),
            tokens=list(flight.request.prompt),
            prompt_tokens=len(flight.request.prompt),
            pages=pages,
            computed=computed,
            priority=flight.request.priority,
        )
        flight.leave = lambda: steps.remove(sequence.sequence, release)
        steps.add(sequence, flight)

    def _on_end(self, flight: Flight) -> None:
        if self._flights.pop(flight, flight) is None:
            self._loads[flight.group] -= len(flight.request.prompt) + flight.request.max_tokens
        record = flight.record()
        self._records.add_request(record)
        event(
            _log, logging.DEBUG, "request.ended", "request ended",
            req=record.request_id, finish=record.finish, prefill=record.prefill,
            output_tokens=record.output_tokens, ttft_s=record.ttft_s, total_s=record.total_s,
            trace_id=trace_id(flight.request.traceparent),
        )  # fmt: skip


def _cause(outcome: Outcome, node: str) -> Cause:
    """The HTTP answer when this was the last way (docs/api.md)."""
    text = f"prefill {node}: {outcome.text}"
    if outcome.cause in (FailCause.STALLED, FailCause.SILENT):
        return Stalled(text)
    if outcome.cause in (FailCause.OVERLOADED, FailCause.DRAINING):
        return Unavailable(text)
    if outcome.cause is FailCause.CORRUPT:
        return Corrupted(text)
    return PrefillLost(text)
