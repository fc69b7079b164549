"""The workers of a TP group: run passes in virtual time, and check every page that they read."""

import asyncio
from collections.abc import Callable

from pdnode.daemon.steps import StepLoop
from pdnode.engine.protocol import Drawn, SequenceStep, Step, StepDone
from pdnode.errors import EngineDied
from pdnode.types import SequenceId
from tests.sim.fabric import Core
from tests.sim.kernel import promise
from tests.sim.memory import EMPTY, Memory, extend

VOCABULARY = 97
BETWEEN_RANKS = 0.2  # of a layer's time


def token_after(mark: int) -> int:
    """What the model says after a prefix."""
    return (mark >> 5) % VOCABULARY


class Worker:
    """`base` and `step` as daemon.steps.StepWorker. The model answers by what it reads.

    `reduces`: a layer ends in an all-reduce, so rank 0 raises the counter of all when the last one
    has written; else each rank raises its own.
    """

    raises_early = False  # planted: before the all-reduce

    def __init__(
        self,
        core: Core,
        memory: Memory,
        *,
        first_rank: int,
        reduces: bool,
        layer_s: Callable[[], float],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.steps: StepLoop | None = None
        self.base = 0
        self.dead = False
        self.on_death: Callable[[], object] = lambda: None
        self.computing: set[int] = set()  # pages that the pass in flight touches
        self._core = core
        self._memory = memory
        self._first_rank = first_rank
        self._reduces = reduces
        self._layer_s = layer_s
        self._later = later
        self._marks: dict[int, list[int]] = {}  # by sequence: mark of each prefix, 0 first
        self._pages: dict[int, list[int]] = {}
        self._answer: asyncio.Future[StepDone] | None = None

    async def step(self, step: Step) -> StepDone:
        if self.dead:
            raise EngineDied("the worker died")
        assert step.base == self.base
        assert self.steps is not None
        for number in step.forget:
            self._pages.pop(number, None)
            self._marks.pop(number, None)
        work = []
        for part in step.sequences:
            if part.new_pages:
                self._pages[part.sequence] = list(part.new_pages)
            pages = self._pages[part.sequence]
            self.computing.update(pages)
            work.append((part, pages, self._prefixes(part)))
        # A worker holds a step's own page tables until it is told to forget them.
        for number in step.forget:
            self._pages.pop(number, None)
            self._marks.pop(number, None)
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        self._later(self._layer_s(), lambda: self._layer(step, work, 0, 0))
        return await self._answer

    def die(self) -> None:
        """As if the process were killed in the middle of a pass."""
        self.dead = True
        self.computing.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EngineDied("the worker died"))
        asyncio.get_running_loop().call_soon(self.on_death)

    def _prefixes(self, part: SequenceStep) -> list[int]:
        """Marks of the true prefixes up to the end of this chunk: what the pages should say."""
        assert self.steps is not None
        marks = self._marks.setdefault(part.sequence, [EMPTY])
        entry = self.steps._entries.get(SequenceId(part.sequence))
        tokens = entry.sequence.tokens if entry is not None else []
        if len(tokens) < part.start and len(marks) <= part.start:
            return []  # removed while the pass was told to others, before its first step
        for position in range(len(marks) - 1, part.start + len(part.tokens)):
            before = position < part.start
            token = tokens[position] if before else part.tokens[position - part.start]
            marks.append(extend(marks[-1], token))
        return marks

    def _layer(
        self,
        step: Step,
        work: list[tuple[SequenceStep, list[int], list[int]]],
        layer: int,
        rank: int,
    ) -> None:
        """One rank computes one layer; the ranks are done one after the other."""
        if self.dead:
            return
        for part, pages, marks in work:
            if marks:
                self._run(part, pages, marks, layer, rank)
        last = self._memory.geometry.tp - 1
        if not self._reduces:
            self._core.raised(self._first_rank + rank)
        elif rank == (0 if self.raises_early else last):
            self._core.raised(self._first_rank)
        if rank < last:
            soon_s = BETWEEN_RANKS * self._layer_s()
            self._later(soon_s, lambda: self._layer(step, work, layer, rank + 1))
            return
        if layer + 1 < self._memory.geometry.layers:
            self._later(self._layer_s(), lambda: self._layer(step, work, layer + 1, 0))
            return
        self.base += self._memory.geometry.layers
        drawn = [
            Drawn(
                part.sequence,
                token_after(marks[part.start + len(part.tokens)] if marks else EMPTY),
                0.0,
            )
            for part, _, marks in work
            if part.sampling is not None
        ]
        # The answer takes its own way: the last writes may be over before it is here.
        self._later(self._layer_s(), lambda: self._done(StepDone(step.pass_id, drawn, 0.0)))

    def _done(self, done: StepDone) -> None:
        self.computing.clear()
        assert self._answer is not None
        if not self._answer.done():
            self._answer.set_result(done)

    def _run(
        self, part: SequenceStep, pages: list[int], marks: list[int], layer: int, rank: int
    ) -> None:
        """Reads all pages before `start`, then writes those of the chunk."""
        size = self._memory.geometry.page_tokens
        start, end = part.start, part.start + len(part.tokens)
        read = -(-start // size)
        written = range(start // size, -(-end // size))
        heads = self._memory.heads
        for cells in self._memory.cells[rank * heads : (rank + 1) * heads]:
            row = cells[layer]
            for index in range(read):
                wanted = marks[min(start, (index + 1) * size)]
                promise(row[pages[index]] == wanted, "a page was read that holds something else")
            for index in written:
                row[pages[index]] = marks[min(end, (index + 1) * size)]
