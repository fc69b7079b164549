"""The step loop: plans a pass, tells who must know, runs it on the worker, hands the tokens out."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pdnode.core.schedule import Chunk, Pass, Scheduler, Sequence
from pdnode.engine.protocol import Drawn, Sampling, Scored, Scoring, SequenceStep, Step, StepDone
from pdnode.errors import EngineDied
from pdnode.types import Run, SequenceId, expand_runs


class StepWorker(Protocol):
    """The worker as the loop needs it. `base`: layers launched so far, before the next step."""

    @property
    def base(self) -> int: ...
    async def step(self, step: Step) -> StepDone: ...


class Runner(Protocol):
    """Who owns a sequence. Called on the event loop; must not block."""

    def planned(self, chunk: Chunk, base: int) -> None:
        """Before the pass runs; `base` is the layer counter's total before it."""

    def computed(self, chunk: Chunk) -> None:
        """The pass is done. Comes for every planned chunk, removed in the meantime or not."""

    def sampling(self) -> Sampling | None:
        """How to draw the next token; asked only for chunks that sample."""

    def scoring(self) -> int | None:
        """How many likeliest tokens to name beside each prompt token; None: these are not scored.

        Asked for chunks of the prompt only. Whoever scores computes all of its prompt here.
        """

    def scored(self, scored: Scored) -> None:
        """Of the next prompt tokens. Comes before `drew`; not called after remove."""

    def drew(self, drawn: Drawn) -> None:
        """The token is appended to the sequence already. Not called after remove."""


@dataclass(slots=True)
class PrefillRunner:
    """A sequence of a peer: computes, never samples."""

    on_planned: Callable[[Chunk, int], None]
    on_computed: Callable[[Chunk], None]

    def planned(self, chunk: Chunk, base: int) -> None:
        self.on_planned(chunk, base)

    def computed(self, chunk: Chunk) -> None:
        self.on_computed(chunk)

    def sampling(self) -> Sampling | None:
        return None

    def scoring(self) -> int | None:
        return None

    def scored(self, scored: Scored) -> None:
        raise AssertionError("a prefill-only sequence was scored")

    def drew(self, drawn: Drawn) -> None:
        raise AssertionError("a prefill-only sequence drew a token")


@dataclass(slots=True)
class StepFigures:
    """Counters since start."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    compute_s: float = 0.0
    fetched_pages: int = 0  # where the steps name pages: written by peers, first read here
    stored_pages: int = 0  # and written for them


@dataclass(slots=True, eq=False)
class _Entry:
    sequence: Sequence
    runner: Runner
    pages_sent: bool = False


@dataclass(slots=True)
class StepLoop:
    """Owns the scheduler while it runs. `run` returns when `stop` is called, raises EngineDied.

    After EngineDied no pass touches any page: `remove` then calls `on_quiet` at once.
    """

    scheduler: Scheduler
    worker: StepWorker
    names_pages: bool = False  # the worker is told which pages peers wrote or will be sent
    figures: StepFigures = field(default_factory=StepFigures)
    busy: bool = False  # a pass is running
    _entries: dict[SequenceId, _Entry] = field(default_factory=dict)
    _numbers: int = 0
    _forget: list[int] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False
    _running: bool = True  # the worker lives
    _quiet: dict[SequenceId, Callable[[], None]] = field(default_factory=dict)

    @property
    def page_tokens(self) -> int:
        return self.scheduler.page_tokens

    @property
    def has_work(self) -> bool:
        """A pass is running, or due: every sequence here has its pages."""
        return self.busy or bool(self._entries)

    def next_sequence(self) -> SequenceId:
        self._numbers += 1
        return SequenceId(self._numbers)

    def add(self, sequence: Sequence, runner: Runner) -> None:
        self._entries[sequence.sequence] = _Entry(sequence, runner)
        self.scheduler.add(sequence)
        self._wake.set()

    def begin_prefill(
        self,
        *,
        tokens: list[int],
        pages: tuple[Run, ...],
        peer: str,
        priority: int,
        planned: Callable[[Chunk, int], None],
        computed: Callable[[Chunk], None],
    ) -> SequenceId:
        """A peer's prompt (without its last token) enters the schedule."""
        sequence = Sequence(
            sequence=self.next_sequence(),
            tokens=list(tokens),
            prompt_tokens=len(tokens),
            pages=pages,
            prefill_only=True,
            peer=peer,
            priority=priority,
        )
        self.add(sequence, PrefillRunner(planned, computed))
        return sequence.sequence

    def remove(self, sequence: SequenceId, on_quiet: Callable[[], None] | None = None) -> None:
        """End a sequence. `on_quiet` is called once no pass touches its pages: now, or after the
        pass in flight."""
        self.scheduler.remove(sequence)
        self._drop(sequence)
        if on_quiet is None:
            return
        if self._running and self.scheduler.in_flight(sequence):
            self._quiet[sequence] = on_quiet
        else:
            on_quiet()

    def waiting_tokens(self) -> int:
        return self.scheduler.waiting_tokens()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        while not self._stopping:
            planned = self.scheduler.plan()
            if planned is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            self.busy = True
            try:
                await self._pass(planned)
            finally:
                self.busy = False
            self.figures.steps += 1

    async def _pass(self, planned: Pass) -> None:
        entries = [self._entries[chunk.sequence] for chunk in planned.chunks]
        base = self.worker.base
        for chunk, entry in zip(planned.chunks, entries, strict=True):
            entry.runner.planned(chunk, base)
        step = self._step(planned, entries, base)
        try:
            done = await self.worker.step(step)
            _check_answer(planned, done)
        except EngineDied:
            self._died()
            raise
        self._commit(planned, entries, done)

    def _died(self) -> None:
        self._running = False
        quiet, self._quiet = self._quiet, {}
        for on_quiet in quiet.values():
            on_quiet()

    def _step(self, planned: Pass, entries: list[_Entry], base: int) -> Step:
        forget, self._forget = self._forget, []
        fetch, store = self._copies(planned, entries) if self.names_pages else ([], [])
        steps = []
        for chunk, entry in zip(planned.chunks, entries, strict=True):
            sequence, start, end = entry.sequence, chunk.start, chunk.end
            new_pages = [] if entry.pages_sent else expand_runs(sequence.pages)
            sampling = entry.runner.sampling() if chunk.samples else None
            scoring = _scoring(entry, chunk) if start + 1 < sequence.prompt_tokens else None
            # By place: this runs once for every token of every stream.
            steps.append(
                SequenceStep(
                    chunk.sequence, start, sequence.tokens[start:end], new_pages, sampling, scoring
                )
            )
            entry.pages_sent = True
            if chunk.sequence not in self._entries:  # removed while the others were told
                self._forget.append(chunk.sequence)
        return Step(planned.pass_id, base, steps, forget, fetch, store)

    def _copies(self, planned: Pass, entries: list[_Entry]) -> tuple[list[int], list[int]]:
        """Pages that a peer wrote and this pass is the first to read, and those that it writes for
        a peer."""
        fetch: list[int] = []
        store: list[int] = []
        for chunk, entry in zip(planned.chunks, entries, strict=True):
            first, end = chunk.start // self.page_tokens, -(-chunk.end // self.page_tokens)
            if entry.sequence.prefill_only:
                store += expand_runs(entry.sequence.pages)[first:end]
            elif not entry.pages_sent and chunk.start:  # it begins with the KV of a peer
                written = -(-chunk.start // self.page_tokens)
                fetch += expand_runs(entry.sequence.pages)[:written]
        self.figures.fetched_pages += len(fetch)
        self.figures.stored_pages += len(store)
        return fetch, store

    def _commit(self, planned: Pass, entries: list[_Entry], done: StepDone) -> None:
        drawn: Mapping[int, Drawn] = {d.sequence: d for d in done.drawn}
        scored: Mapping[int, Scored] = {s.sequence: s for s in done.scored}
        alive = {SequenceId(n): d.token for n, d in drawn.items() if n in self._entries}
        self.scheduler.commit(planned.pass_id, alive)
        self.figures.compute_s += done.compute_s
        for chunk, entry in zip(planned.chunks, entries, strict=True):
            if chunk.samples and chunk.end - chunk.start == 1:
                self.figures.decode_tokens += 1
            else:
                self.figures.prefill_tokens += chunk.end - chunk.start
            entry.runner.computed(chunk)
            # `computed` and the runners before may have removed it
            if chunk.sequence in scored and chunk.sequence in self._entries:
                entry.runner.scored(scored[chunk.sequence])
            if chunk.samples and chunk.sequence in self._entries:
                entry.runner.drew(drawn[chunk.sequence])
            elif entry.sequence.prefill_only and chunk.last:
                self._drop(chunk.sequence)
            if chunk.sequence in self._quiet:
                self._quiet.pop(chunk.sequence)()

    def _drop(self, sequence: SequenceId) -> None:
        entry = self._entries.pop(sequence, None)
        if entry is not None and entry.pages_sent:
            self._forget.append(sequence)


def _scoring(entry: _Entry, chunk: Chunk) -> Scoring | None:
    """The tokens that follow the rows of a prompt chunk, as far as they belong to the prompt."""
    targets_end = min(chunk.end + 1, entry.sequence.prompt_tokens)
    top = entry.runner.scoring()
    if top is None:
        return None
    return Scoring(entry.sequence.tokens[chunk.start + 1 : targets_end], top)


def _check_answer(planned: Pass, done: StepDone) -> None:
    if done.pass_id != planned.pass_id:
        raise EngineDied(f"the worker answered pass {done.pass_id} to {planned.pass_id}")
    wanted = [chunk.sequence for chunk in planned.chunks if chunk.samples]
    if [drawn.sequence for drawn in done.drawn] != wanted:
        raise EngineDied(f"the worker drew for other sequences than pass {done.pass_id} asked for")
