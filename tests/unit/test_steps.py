"""StepLoop: what the worker is told, who is called when, and when pages are quiet."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from pdnode.core.schedule import Chunk, Scheduler, Sequence
from pdnode.daemon.steps import StepLoop
from pdnode.engine.protocol import Drawn, Sampling, Scored, Scoring, Step, StepDone
from pdnode.errors import EngineDied
from pdnode.types import Run, SequenceId

PAGE_TOKENS = 4
GREEDY = Sampling(0.0, 0, 1.0, 7, 0, [])


class Worker:
    """Holds every step until the test answers it."""

    def __init__(self) -> None:
        self.base = 0
        self.steps: asyncio.Queue[Step] = asyncio.Queue()
        self.answers: asyncio.Queue[StepDone | EngineDied] = asyncio.Queue()

    async def step(self, step: Step) -> StepDone:
        self.steps.put_nowait(step)
        answer = await self.answers.get()
        if isinstance(answer, EngineDied):
            raise answer
        self.base += 2
        return answer


@dataclass(slots=True, eq=False)
class Runner:
    """Notes every call as (name, …) in a list that all runners of a test share."""

    name: str
    log: list[tuple[object, ...]]
    drew_hook: Callable[[], None] = lambda: None
    planned_hook: Callable[[], None] = lambda: None
    scored_top: int | None = None

    def planned(self, chunk: Chunk, base: int) -> None:
        self.log.append((self.name, "planned", chunk.start, chunk.end, base))
        self.planned_hook()

    def computed(self, chunk: Chunk) -> None:
        self.log.append((self.name, "computed", chunk.end))

    def sampling(self) -> Sampling:
        self.log.append((self.name, "sampling"))
        return GREEDY

    def scoring(self) -> int | None:
        return self.scored_top

    def scored(self, scored: Scored) -> None:
        self.log.append((self.name, "scored", scored))

    def drew(self, drawn: Drawn) -> None:
        self.log.append((self.name, "drew", drawn.token, drawn.logprob))
        self.drew_hook()


@dataclass(slots=True, eq=False)
class Loop:
    """A running loop with its worker; `turn` takes the next step and answers it."""

    worker: Worker
    steps: StepLoop
    task: asyncio.Task[None]
    log: list[tuple[object, ...]] = field(default_factory=list)

    def add(
        self, name: str, tokens: int, *, computed: int = 0, first_page: int = 0
    ) -> tuple[SequenceId, Runner]:
        runner = Runner(name, self.log)
        number = self.steps.next_sequence()
        pages = (Run(first_page, -(-(tokens + 4) // PAGE_TOKENS)),)
        sequence = Sequence(
            sequence=number,
            tokens=list(range(tokens)),
            prompt_tokens=tokens,
            pages=pages,
            computed=computed,
        )
        self.steps.add(sequence, runner)
        return number, runner

    def add_prefill(self, tokens: int) -> SequenceId:
        return self.steps.begin_prefill(
            tokens=list(range(tokens)),
            pages=(Run(20, -(-tokens // PAGE_TOKENS)),),
            peer="d",
            priority=0,
            planned=lambda chunk, base: self.log.append(("p", chunk.start, chunk.end, base)),
            computed=lambda chunk: self.log.append(("p", "computed", chunk.end)),
        )

    async def step(self) -> Step:
        return await asyncio.wait_for(self.worker.steps.get(), 5)

    def answer(self, step: Step) -> None:
        """Draws token 50 + sequence number wherever the step samples."""
        drawn = [Drawn(s.sequence, 50 + s.sequence, -0.5) for s in step.sequences if s.sampling]
        self.worker.answers.put_nowait(StepDone(step.pass_id, drawn, 0.25))

    async def turn(self) -> Step:
        step = await self.step()
        self.answer(step)
        return step

    def take(self) -> list[tuple[object, ...]]:
        log = list(self.log)
        self.log.clear()
        return log

    async def settle(self) -> None:
        """Until the loop has taken the answer and waits again."""
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def loop() -> AsyncIterator[Loop]:
    worker = Worker()
    scheduler = Scheduler(page_tokens=PAGE_TOKENS, chunk_tokens=8, max_running=8)
    steps = StepLoop(scheduler, worker)
    task = asyncio.create_task(steps.run())
    yield Loop(worker, steps, task)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_prefill_sequence_is_told_before_and_after_its_passes(loop: Loop) -> None:
    number = loop.add_prefill(10)
    first = await loop.step()
    assert loop.take() == [("p", 0, 8, 0)], "before the worker runs it"
    assert (first.base, first.forget) == (0, [])
    (one,) = first.sequences
    assert (one.tokens, one.new_pages, one.sampling) == ([*range(8)], [20, 21, 22], None)
    loop.answer(first)
    second = await loop.turn()
    assert loop.take() == [("p", "computed", 8), ("p", 8, 10, 2)]
    (two,) = second.sequences
    assert (two.start, two.tokens, two.new_pages) == (8, [8, 9], []), "pages are sent once"
    await loop.settle()
    assert loop.take() == [("p", "computed", 10)]
    assert loop.steps.scheduler.waiting == 0
    loop.add("next", 1)
    assert (await loop.turn()).forget == [number]
    assert (loop.steps.figures.prefill_tokens, loop.steps.figures.compute_s) == (10, 0.5)


async def test_a_decoding_sequence_draws_until_it_is_removed(loop: Loop) -> None:
    number, runner = loop.add("a", 3, computed=2)
    quiet: list[str] = []
    (one,) = (await loop.turn()).sequences
    assert (one.start, one.tokens, one.sampling, one.new_pages) == (2, [2], GREEDY, [0, 1])
    step = await loop.step()
    (two,) = step.sequences
    assert (two.start, two.tokens, two.new_pages) == (3, [51], []), "the token drawn before"
    runner.drew_hook = lambda: loop.steps.remove(number, lambda: quiet.append("now"))
    loop.answer(step)
    await loop.settle()
    assert quiet == ["now"], "removed between passes: at once"
    assert [entry for entry in loop.take() if entry[1] == "drew"] == [("a", "drew", 51, -0.5)] * 2
    assert loop.worker.steps.empty()


async def test_sampling_is_asked_only_of_chunks_that_draw(loop: Loop) -> None:
    loop.add("a", 10)
    await loop.turn()
    await loop.step()
    assert [entry[1] for entry in loop.take()] == ["planned", "computed", "planned", "sampling"]


async def test_removal_in_a_pass_is_quiet_after_it(loop: Loop) -> None:
    first, _ = loop.add("a", 3, computed=2)
    second, _ = loop.add("b", 3, computed=2, first_page=5)
    step = await loop.step()
    loop.take()
    loop.steps.remove(first, lambda: loop.log.append(("quiet",)))
    loop.steps.remove(first)
    assert loop.take() == []
    loop.answer(step)
    after = await loop.step()
    assert loop.take()[:4] == [
        ("a", "computed", 3),
        ("quiet",),
        ("b", "computed", 3),
        ("b", "drew", 50 + second, -0.5),
    ], "a removed sequence is told `computed`, and no token"
    assert (after.forget, [s.sequence for s in after.sequences]) == ([first], [second])
    loop.answer(after)
    assert (await loop.step()).forget == [], "forgotten once"


async def test_a_prefill_removed_in_its_pass_is_told_when_it_ends(loop: Loop) -> None:
    number = loop.add_prefill(20)
    step = await loop.step()
    loop.steps.remove(number)
    loop.take()
    loop.answer(step)
    await loop.settle()
    assert loop.take() == [("p", "computed", 8)]
    assert loop.worker.steps.empty()
    assert loop.steps.waiting_tokens() == 0


async def test_one_that_never_ran_is_quiet_at_once_and_not_forgotten(loop: Loop) -> None:
    loop.add("a", 3, computed=2)
    step = await loop.step()
    late, _ = loop.add("late", 3, first_page=5)
    loop.steps.remove(late, lambda: loop.log.append(("quiet",)))
    assert loop.take()[-1] == ("quiet",)
    loop.answer(step)
    assert (await loop.step()).forget == []


async def test_one_removed_while_others_are_told_runs_and_is_forgotten_after(loop: Loop) -> None:
    first, _ = loop.add("a", 3, computed=2)
    _, runner = loop.add("b", 3, computed=2, first_page=5)
    runner.planned_hook = lambda: loop.steps.remove(first, lambda: loop.log.append(("quiet",)))
    step = await loop.step()
    assert (len(step.sequences), step.forget) == (2, [])
    assert ("quiet",) not in loop.take()
    loop.answer(step)
    assert (await loop.step()).forget == [first]
    assert ("quiet",) in loop.take()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (EngineDied("worker exited with 9"), "worker exited with 9"),
        (StepDone(99, [], 0.0), "the worker answered pass 99 to 1"),
        (StepDone(1, [], 0.0), "the worker drew for other sequences than pass 1 asked for"),
        (
            StepDone(1, [Drawn(9, 1, 0.0)], 0.0),
            "the worker drew for other sequences than pass 1 asked for",
        ),
    ],
)
async def test_a_dead_worker_touches_no_page(
    loop: Loop, answer: StepDone | EngineDied, text: str
) -> None:
    first, _ = loop.add("a", 3, computed=2)
    second, _ = loop.add("b", 3, first_page=5)
    await loop.step()
    loop.steps.remove(first, lambda: loop.log.append(("quiet a",)))
    loop.take()
    if isinstance(answer, StepDone) and answer.pass_id == 1 and answer.drawn:
        answer = StepDone(1, [Drawn(9, 1, 0.0), Drawn(second, 1, 0.0)], 0.0)
    loop.worker.answers.put_nowait(answer)
    with pytest.raises(EngineDied, match=text):
        await loop.task
    assert loop.take() == [("quiet a",)]
    loop.steps.remove(second, lambda: loop.log.append(("quiet b",)))
    assert loop.take() == [("quiet b",)]
    assert not loop.steps.busy


async def test_busy_and_stop(loop: Loop) -> None:
    assert not loop.steps.busy
    loop.add("a", 3, computed=2)
    step = await loop.step()
    assert loop.steps.busy
    loop.steps.stop()
    loop.answer(step)
    await asyncio.wait_for(loop.task, 5)
    assert (loop.steps.busy, loop.steps.figures.steps, loop.steps.figures.decode_tokens) == (
        False,
        1,
        1,
    )


async def test_stop_wakes_an_idle_loop(loop: Loop) -> None:
    await loop.settle()
    loop.steps.stop()
    await asyncio.wait_for(loop.task, 5)
    assert loop.steps.figures.steps == 0


async def test_prompt_chunks_are_scored_over_their_edges_and_nothing_else_is(loop: Loop) -> None:
    """11 tokens in chunks of 8 and 3: the token after the first chunk is its last target."""
    number, runner = loop.add("a", 11)
    runner.scored_top = 2
    first = await loop.step()
    (one,) = first.sequences
    assert one.scoring == Scoring([*range(1, 9)], 2)
    scored = [Scored(number, [-0.5] * 8, [[]] * 8), Scored(number, [-1.0] * 2, [[]] * 2)]
    loop.worker.answers.put_nowait(StepDone(first.pass_id, [], 0.25, [scored[0]]))
    second = await loop.step()
    (two,) = second.sequences
    assert two.scoring == Scoring([9, 10], 2)  # of three rows: the last one's token is drawn
    drawn = [Drawn(number, 51, -0.5)]
    loop.worker.answers.put_nowait(StepDone(second.pass_id, drawn, 0.25, [scored[1]]))
    third = await loop.turn()
    assert third.sequences[0].scoring is None
    told = [entry[1:] for entry in loop.take() if entry[1] in ("scored", "drew")]
    assert told == [("scored", scored[0]), ("scored", scored[1]), ("drew", 51, -0.5)]
    loop.steps.remove(number)


async def test_scores_of_a_removed_sequence_are_dropped(loop: Loop) -> None:
    number, runner = loop.add("a", 5)
    runner.scored_top = 0
    step = await loop.step()
    loop.steps.remove(number)
    done = StepDone(
        step.pass_id, [Drawn(number, 51, -0.5)], 0.25, [Scored(number, [-1.0] * 4, [[]] * 4)]
    )
    loop.worker.answers.put_nowait(done)
    await loop.settle()
    assert [entry[1] for entry in loop.take()] == ["planned", "sampling", "computed"]


async def test_pages_that_peers_write_and_read(loop: Loop) -> None:
    """Named in the step: what it computes for a peer, and once what a peer wrote."""
    loop.steps.names_pages = True
    loop.add_prefill(11)
    loop.add("d", 7, computed=6, first_page=3)
    step = await loop.turn()
    assert [(part.start, len(part.tokens)) for part in step.sequences] == [(6, 1), (0, 4)]
    assert (step.fetch, step.store) == ([3, 4], [20])
    step = await loop.turn()
    assert (step.fetch, step.store) == ([], [21, 22])
    loop.add("local", 9, first_page=10)
    step = await loop.turn()
    assert len(step.sequences) == 2
    assert (step.fetch, step.store) == ([], [])
    figures = loop.steps.figures
    assert (figures.fetched_pages, figures.stored_pages) == (2, 3)
