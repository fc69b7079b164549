"""One request on its way through this node: admitted, prefilled somewhere, decoded, finished."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from pdnode.core.request import Request, Score, TokenEvent
from pdnode.core.schedule import Chunk
from pdnode.daemon.penalties import Changes, changes_logits
from pdnode.engine.protocol import Drawn, Sampling, Scored
from pdnode.errors import Cause
from pdnode.messenger.pull import Pull
from pdnode.obs.faults import report
from pdnode.obs.records import RequestRecord


@dataclass(slots=True)
class Times:
    """Monotonic times of one request, in seconds; 0 while it has not come so far."""

    submitted: float
    begun: float = 0.0  # dispatched, or entered the schedule for a local prefill
    complete: float = 0.0  # every page is here
    first_token: float = 0.0
    ended: float = 0.0


@dataclass(slots=True, eq=False)
class Flight:
    """Implements api.service.Generation and steps.Runner. Runs on the event loop.

    `leave(flight)` is set by the service for the phase that the request is in: it gives back all
    that the phase holds. It is called exactly once, by whoever ends the request.
    """

    request: Request
    clock: Callable[[], float]
    times: Times
    on_end: Callable[["Flight"], None]
    group: int = 0  # the TP group that has its pages
    prefill: str = "local"
    pull: Pull | None = None
    task: asyncio.Task[None] | None = None
    leave: Callable[[], None] | None = None
    generated: int = 0
    finish: str | None = None  # stop | length | cancelled | the code of a Cause
    _changes: Changes | None = field(init=False)
    _prompt_scores: list[Score] = field(default_factory=list)
    # What the one reader has not taken, and what it waits for; asyncio.Queue takes twice as long.
    _items: deque[TokenEvent | Cause | None] = field(default_factory=deque)
    _reader: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self._changes = Changes(self.request) if changes_logits(self.request) else None

    # api.service.Generation

    async def events(self) -> AsyncIterator[TokenEvent]:
        """For one reader."""
        while True:
            while not self._items:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            item = self._items.popleft()
            if item is None:
                return
            if isinstance(item, Cause):
                raise item
            yield item
            if item.finish is not None:
                return

    def cancel(self, reason: str) -> None:
        """End without an answer (`reason`: "cancelled" or "stop"). Idempotent."""
        if self.finish is None:
            self._end(reason)
            self._put(None)

    def fail(self, cause: Cause) -> None:
        if self.finish is None:
            self._end(cause.code)
            self._put(cause)

    # steps.Runner

    def planned(self, chunk: Chunk, base: int) -> None:
        pass

    def computed(self, chunk: Chunk) -> None:
        pass

    def sampling(self) -> Sampling:
        request, draw = self.request, self.generated
        banned = sorted(request.stop_tokens) if draw < request.min_tokens else []
        changes = None if self._changes is None else self._changes.packed()
        # By place: this runs once for every token of every stream.
        return Sampling(
            request.temperature, request.top_k, request.top_p, request.seed,
            draw, banned, request.logprobs, changes,
        )  # fmt: skip

    def scoring(self) -> int | None:
        return self.request.logprobs if self.request.score_prompt else None

    def scored(self, scored: Scored) -> None:
        self._prompt_scores += map(Score, scored.logprobs, scored.tops)

    def drew(self, drawn: Drawn) -> None:
        token = drawn.token
        self.generated += 1
        if self._changes is not None:
            self._changes.drew(token)
        if self.generated == 1:
            self.times.first_token = self.clock()
        finish = None
        if token in self.request.stop_tokens:
            finish = "stop"
        elif self.generated >= self.request.max_tokens:
            finish = "length"
        if finish is not None:
            self._end(finish)
        prompt: Sequence[Score] = ()
        if self._prompt_scores:
            prompt, self._prompt_scores = self._prompt_scores, []
        self._put(TokenEvent(token, drawn.logprob, finish, drawn.top, prompt))

    def _put(self, item: TokenEvent | Cause | None) -> None:
        self._items.append(item)
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    # the end

    def _end(self, finish: str) -> None:
        self.finish = finish
        self.times.ended = self.clock()
        self.on_end(self)
        leave, self.leave = self.leave, None
        if leave is not None:
            try:
                leave()
            except Exception as error:  # noqa: BLE001 - whose fault it is, this request ends
                report(error, "what a request held could not be given back")
        task = self.task
        if task is not None and not task.done() and task is not asyncio.current_task():
            task.cancel()

    def record(self) -> RequestRecord:
        """Durations of the phases; see RequestRecord."""
        times, pull = self.times, self.pull
        ended = times.ended
        begun = times.begun or ended
        first = times.first_token or ended
        complete = times.complete or first
        if pull is None:
            queue_s, prefill_s, transfer_s, first_step_s = 0.0, first - begun, 0.0, 0.0
        else:
            queue_s = pull.queue_s
            # The pages were here, so the last layer was computed by then, whatever the pass took
            # to return. Before `drained` the prefill's last word on it may be missing.
            most_s = complete - begun - queue_s
            prefill_s = min(pull.prefill_s, most_s) if pull.grant.drained else most_s
            transfer_s = most_s - prefill_s
            first_step_s = first - complete
        return RequestRecord(
            request_id=self.request.request_id,
            prefill=self.prefill,
            finish=self.finish or "",
            prompt_tokens=len(self.request.prompt),
            output_tokens=self.generated,
            admit_s=begun - times.submitted,
            prefill_queue_s=queue_s,
            prefill_s=prefill_s,
            transfer_wait_s=transfer_s,
            first_step_s=first_step_s,
            ttft_s=first - times.submitted,
            decode_s=ended - first,
            total_s=ended - times.submitted,
            pages=0 if pull is None else pull.sent_pages,
        )
