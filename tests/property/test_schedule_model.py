"""Scheduler against a naive model: sequences in arrival order, and the tokens run of each."""

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdnode.core.schedule import Chunk, Pass, Scheduler, Sequence
from pdnode.types import Run, SequenceId

PEERS = ("", "a", "b")


@dataclass(slots=True, eq=False)
class Model:
    """What must be true of one sequence, kept apart from the scheduler's own record."""

    sequence: Sequence
    tokens: list[int]
    done: int
    arrival: int
    chunks: int = 0
    drawn: list[int] = field(default_factory=list)
    wait: int = 0  # passes since its last decode step

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    @property
    def decodes(self) -> bool:
        return self.left == 1 and not self.sequence.prefill_only


class ScheduleMachine(RuleBasedStateMachine):
    @initialize(
        page_tokens=st.integers(1, 6), chunk_tokens=st.integers(1, 30), most=st.integers(1, 5)
    )
    def start(self, page_tokens: int, chunk_tokens: int, most: int) -> None:
        self.page_tokens, self.chunk_tokens, self.most = page_tokens, chunk_tokens, most
        self.scheduler = Scheduler(
            page_tokens=page_tokens, chunk_tokens=chunk_tokens, max_running=most
        )
        self.live: dict[SequenceId, Model] = {}
        self.numbers = count(1)
        self.passes = 0
        self.flight: Pass | None = None
        self.removed: list[SequenceId] = []

    @rule(
        prompt=st.integers(1, 50),
        computed_pages=st.integers(0, 3),
        kind=st.sampled_from(["prefill_only", "whole", "imported"]),
        peer=st.sampled_from(PEERS),
        priority=st.integers(0, 1),
    )
    def add(self, prompt: int, computed_pages: int, kind: str, peer: str, priority: int) -> None:
        number = SequenceId(next(self.numbers))
        computed = min(computed_pages, (prompt - 1) // self.page_tokens) * self.page_tokens
        if kind == "imported":
            computed = prompt - 1
        tokens = [number * 1000 + i for i in range(prompt)]
        sequence = Sequence(
            sequence=number,
            tokens=list(tokens),
            prompt_tokens=prompt,
            pages=(Run(0, 1000),),
            computed=computed,
            prefill_only=kind == "prefill_only",
            peer=peer,
            priority=priority,
        )
        self.scheduler.add(sequence)
        self.live[number] = Model(sequence, tokens, computed, arrival=number)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        flies = self.flight is not None and number in {c.sequence for c in self.flight.chunks}
        assert self.scheduler.remove(number)
        assert not self.scheduler.remove(number)
        assert self.scheduler.in_flight(number) == flies
        del self.live[number]
        if flies:
            self.removed.append(number)

    @precondition(lambda self: self.flight is None)
    @rule()
    def plan(self) -> None:
        self.flight = self.scheduler.plan()
        assert (self.flight is None) == (not self.live)
        if self.flight is None:
            return
        self.passes += 1
        assert self.flight.pass_id == self.passes
        chunks = self.flight.chunks
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            self.check_chunk(chunk)
        decodes = [self.live[chunk.sequence].decodes for chunk in chunks]
        steps = sum(decodes)
        assert decodes == sorted(decodes, reverse=True), "decode steps come first"
        decoding = [model for model in self.live.values() if model.decodes]
        assert steps == min(self.most, len(decoding))
        self.check_turns(chunks[:steps], decoding)
        self.check_prefill(chunks[steps:], max(self.chunk_tokens - steps, self.page_tokens))
        total = sum(chunk.end - chunk.start for chunk in chunks)
        assert total <= self.scheduler.max_pass_tokens

    def check_chunk(self, chunk: Chunk) -> None:
        model = self.live[chunk.sequence]
        assert chunk.start == model.done, "every token once, in order"
        assert chunk.start < chunk.end <= len(model.tokens)
        assert chunk.last == (chunk.end == len(model.tokens))
        assert chunk.last or chunk.end % self.page_tokens == 0
        assert chunk.samples == (chunk.last and not model.sequence.prefill_only)
        assert chunk.number == model.chunks
        model.chunks += 1

    def check_turns(self, steps: tuple[Chunk, ...], decoding: list[Model]) -> None:
        """Who is passed over has not waited longer than anyone who goes."""
        went = [self.live[chunk.sequence] for chunk in steps]
        passed_over = [model for model in decoding if model not in went]
        if passed_over:
            assert min(m.wait for m in went) >= max(m.wait for m in passed_over)
        for model in went:
            model.wait = 0
        for model in passed_over:
            model.wait += 1

    def check_prefill(self, chunks: tuple[Chunk, ...], budget: int) -> None:
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        assert tokens <= budget
        waiting = [model for model in self.live.values() if not model.decodes]
        if waiting:
            assert chunks, "prefill never stands still"
        # In its peer: higher priority first, then the one that came first; only done ones are left.
        for peer in PEERS:
            order = sorted(
                (model for model in waiting if model.sequence.peer == peer),
                key=lambda model: (-model.sequence.priority, model.arrival),
            )
            mine = [c for c in chunks if self.live[c.sequence].sequence.peer == peer]
            assert [c.sequence for c in mine] == [m.sequence.sequence for m in order[: len(mine)]]
        assert all(chunk.last for chunk in chunks[:-1])
        if len(chunks) < len(waiting):
            assert budget - tokens < self.page_tokens, "no page of budget is left unused"

    @precondition(lambda self: self.flight is not None)
    @rule(keep_removed=st.booleans(), stop=st.booleans())
    def commit(self, keep_removed: bool, stop: bool) -> None:
        flight = self.flight
        assert flight is not None
        drawn = {
            chunk.sequence: self.passes * 1000 + index
            for index, chunk in enumerate(flight.chunks)
            if chunk.samples and (keep_removed or chunk.sequence in self.live)
        }
        removed = self.scheduler.commit(flight.pass_id, drawn)
        assert sorted(removed) == sorted(self.removed)
        self.removed.clear()
        self.flight = None
        for chunk in flight.chunks:
            model = self.live.get(chunk.sequence)
            if model is None:
                continue
            model.done = chunk.end
            if chunk.samples:
                model.tokens.append(drawn[chunk.sequence])
                if stop:
                    assert self.scheduler.remove(chunk.sequence)
                    del self.live[chunk.sequence]
            elif chunk.last:
                assert not self.scheduler.remove(chunk.sequence), "it left by itself"
                del self.live[chunk.sequence]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "live"):
            return
        models = self.live.values()
        waiting = [model for model in models if not model.decodes]
        assert self.scheduler.running == len(models) - len(waiting)
        assert self.scheduler.waiting == len(waiting)
        assert self.scheduler.waiting_tokens() == sum(model.left for model in waiting)
        for peer in PEERS:
            left = sum(model.left for model in waiting if model.sequence.peer == peer)
            assert self.scheduler.waiting_tokens(peer) == left
        for model in models:
            assert model.sequence.tokens == model.tokens
            assert model.sequence.computed == model.done
            assert self.scheduler.position(model.sequence.sequence) < max(1, len(waiting))

    def teardown(self) -> None:
        """Left alone, everything comes to its end, and nothing stays behind."""
        if not hasattr(self, "live"):
            return
        if self.flight is not None:
            self.commit(keep_removed=True, stop=True)
        for _ in range(2 * sum(model.left for model in self.live.values()) + 1):
            if not self.live:
                break
            self.plan()
            self.commit(keep_removed=True, stop=True)
        assert not self.live
        assert self.scheduler.plan() is None
        assert (self.scheduler.waiting, self.scheduler.running) == (0, 0)


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(max_examples=100, stateful_step_count=40)


def prompt(number: int, tokens: int, peer: str = "") -> Sequence:
    return Sequence(
        sequence=SequenceId(number),
        tokens=[0] * tokens,
        prompt_tokens=tokens,
        pages=(Run(0, tokens),),
        prefill_only=True,
        peer=peer,
    )


@given(
    peers=st.integers(2, 5),
    page_tokens=st.integers(1, 8),
    pages_a_chunk=st.integers(1, 6),
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=40),
)
def test_peers_with_work_get_the_same(
    peers: int, page_tokens: int, pages_a_chunk: int, lengths: list[int]
) -> None:
    """Tokens of peers that always have work differ by at most one chunk, whatever their prompts."""
    chunk_tokens = page_tokens * pages_a_chunk
    scheduler = Scheduler(page_tokens=page_tokens, chunk_tokens=chunk_tokens, max_running=1)
    numbers = count()
    owner: dict[SequenceId, int] = {}
    served = [0] * peers

    def top_up() -> None:
        """Each peer keeps more than one pass can take, in prompts of its own lengths."""
        for peer in range(peers):
            while scheduler.waiting_tokens(str(peer)) <= chunk_tokens:
                number = next(numbers)
                length = lengths[number * (peer + 1) % len(lengths)]
                owner[SequenceId(number)] = peer
                scheduler.add(prompt(number, length, str(peer)))

    for _ in range(30):
        top_up()
        planned = scheduler.plan()
        assert planned is not None
        for chunk in planned.chunks:
            served[owner[chunk.sequence]] += chunk.end - chunk.start
        scheduler.commit(planned.pass_id, {})
        assert max(served) - min(served) <= chunk_tokens
    assert sum(served) > 30 * (chunk_tokens - page_tokens)


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 90), st.sampled_from(PEERS)), min_size=1, max_size=12
    ),
    chunk_tokens=st.integers(4, 40),
    run=st.integers(0, 5),
)
def test_positions_tell_the_order_of_the_next_chunks(
    lengths: list[tuple[int, str]], chunk_tokens: int, run: int
) -> None:
    scheduler = Scheduler(page_tokens=4, chunk_tokens=chunk_tokens, max_running=1)
    for number, (tokens, peer) in enumerate(lengths):
        scheduler.add(prompt(number, tokens, peer))
    for _ in range(run):
        planned = scheduler.plan()
        if planned is None:
            return
        scheduler.commit(planned.pass_id, {})
    told: dict[SequenceId, int] = {}
    for number in range(len(lengths)):
        try:
            told[SequenceId(number)] = scheduler.position(SequenceId(number))
        except AssertionError:
            continue  # done
    order: list[SequenceId] = []
    while (planned := scheduler.plan()) is not None:
        order += [c.sequence for c in planned.chunks if c.sequence not in order]
        scheduler.commit(planned.pass_id, {})
    assert told.keys() == set(order)
    for place, number in enumerate(order):
        assert told[number] <= place < told[number] + len(PEERS), "exact but for level peers"


@given(decoders=st.integers(1, 12), most=st.integers(1, 5))
def test_decoders_take_turns(decoders: int, most: int) -> None:
    scheduler = Scheduler(page_tokens=4, chunk_tokens=4, max_running=most)
    steps = dict.fromkeys(range(decoders), 0)
    for number in range(decoders):
        scheduler.add(
            Sequence(
                sequence=SequenceId(number),
                tokens=[1, 2, 3],
                prompt_tokens=3,
                pages=(Run(0, 30),),
                computed=2,
            )
        )
    for _ in range(20):
        planned = scheduler.plan()
        assert planned is not None
        assert len(planned.chunks) == min(decoders, most)
        for chunk in planned.chunks:
            steps[chunk.sequence] += 1
        scheduler.commit(planned.pass_id, {chunk.sequence: 9 for chunk in planned.chunks})
        assert max(steps.values()) - min(steps.values()) <= 1


@given(tokens=st.integers(1, 60), at=st.integers(0, 8))
def test_a_removed_prompt_leaves_nothing(tokens: int, at: int) -> None:
    scheduler = Scheduler(page_tokens=4, chunk_tokens=8, max_running=1)
    scheduler.add(prompt(1, tokens))
    for _ in range(at // 2):
        planned = scheduler.plan()
        if planned is None:
            return
        scheduler.commit(planned.pass_id, {})
    planned = scheduler.plan() if at % 2 else None
    known = scheduler.remove(SequenceId(1))
    assert known == (at // 2 * 8 < tokens)
    if planned is not None:
        assert scheduler.commit(planned.pass_id, {}) == (SequenceId(1),)
    assert (scheduler.waiting, scheduler.running, scheduler.waiting_tokens()) == (0, 0, 0)
    assert scheduler.plan() is None
    with pytest.raises(AssertionError):
        scheduler.position(SequenceId(1))
