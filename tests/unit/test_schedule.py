"""Scheduler: what a pass holds, by cases; the rest is in property/test_schedule_model.py."""

import pytest

from pdnode.core.schedule import Chunk, Pass, Scheduler, Sequence
from pdnode.types import Run, SequenceId


def sequence(
    number: int,
    prompt: int,
    *,
    computed: int = 0,
    prefill_only: bool = False,
    peer: str = "",
    priority: int = 0,
    pages: int = 64,
) -> Sequence:
    return Sequence(
        sequence=SequenceId(number),
        tokens=list(range(prompt)),
        prompt_tokens=prompt,
        pages=(Run(number * 64, pages),),
        computed=computed,
        prefill_only=prefill_only,
        peer=peer,
        priority=priority,
    )


def scheduler(
    *sequences: Sequence, page_tokens: int = 16, chunk_tokens: int = 64, max_running: int = 8
) -> Scheduler:
    made = Scheduler(page_tokens=page_tokens, chunk_tokens=chunk_tokens, max_running=max_running)
    for one in sequences:
        made.add(one)
    return made


def planned(schedule: Scheduler) -> Pass:
    found = schedule.plan()
    assert found is not None
    return found


def finish(schedule: Scheduler, flight: Pass, token: int = 7) -> tuple[SequenceId, ...]:
    return schedule.commit(
        flight.pass_id, {chunk.sequence: token for chunk in flight.chunks if chunk.samples}
    )


def step(schedule: Scheduler) -> list[tuple[int, int, int]]:
    """One pass, run and committed: (sequence, start, end) of its chunks."""
    flight = planned(schedule)
    finish(schedule, flight)
    return [(chunk.sequence, chunk.start, chunk.end) for chunk in flight.chunks]


def test_a_prompt_in_chunks_then_decode_steps() -> None:
    one = sequence(1, 100)
    schedule = scheduler(one)
    first = planned(schedule)
    assert first == Pass(1, (Chunk(SequenceId(1), 0, 64, samples=False, last=False, number=0),))
    assert finish(schedule, first) == ()
    second = planned(schedule)
    assert second == Pass(2, (Chunk(SequenceId(1), 64, 100, samples=True, last=True, number=1),))
    assert (schedule.waiting, schedule.running) == (1, 0)
    finish(schedule, second, token=42)
    assert (schedule.waiting, schedule.running) == (0, 1)
    assert (one.tokens[100:], one.computed) == ([42], 100)
    third = planned(schedule)
    assert third == Pass(3, (Chunk(SequenceId(1), 100, 101, samples=True, last=True, number=2),))
    finish(schedule, third, token=43)
    assert one.tokens[100:] == [42, 43]
    assert schedule.remove(SequenceId(1))
    assert schedule.plan() is None


def test_prefill_only_samples_nothing_and_leaves_by_itself() -> None:
    one = sequence(1, 65, prefill_only=True)
    schedule = scheduler(one)
    assert step(schedule) == [(1, 0, 64)]
    last = planned(schedule)
    assert last.chunks == (Chunk(SequenceId(1), 64, 65, samples=False, last=True, number=1),)
    finish(schedule, last)
    assert (one.computed, len(one.tokens)) == (65, 65)
    assert (schedule.waiting, schedule.running, schedule.waiting_tokens()) == (0, 0, 0)
    assert schedule.plan() is None
    assert not schedule.remove(SequenceId(1))


def test_imported_kv_starts_with_a_decode_step() -> None:
    schedule = scheduler(sequence(1, 200), sequence(2, 100, computed=99))
    assert (schedule.running, schedule.waiting) == (1, 1)
    assert schedule.position(SequenceId(2)) == 0
    assert step(schedule) == [(2, 99, 100), (1, 0, 48)], "decode first; the rest on a page edge"


def test_a_prompt_of_one_token_is_a_decode_step() -> None:
    schedule = scheduler(sequence(1, 1))
    assert step(schedule) == [(1, 0, 1)]
    assert step(schedule) == [(1, 1, 2)]


def test_decode_steps_leave_prefill_one_page_at_least() -> None:
    decoding = [sequence(number, 50, computed=49) for number in range(1, 9)]
    schedule = scheduler(*decoding, sequence(9, 40), chunk_tokens=16)
    assert schedule.max_pass_tokens == 24
    assert step(schedule)[8:] == [(9, 0, 16)]
    assert step(schedule)[8:] == [(9, 16, 32)]
    assert step(schedule)[8:] == [(9, 32, 40)]
    assert scheduler(chunk_tokens=64).max_pass_tokens == 64


def test_more_decoders_than_fit_take_turns() -> None:
    decoding = [sequence(number, 50, computed=49) for number in range(1, 6)]
    schedule = scheduler(*decoding, max_running=2)
    turns = [[number for number, _, _ in step(schedule)] for _ in range(5)]
    assert turns == [[1, 2], [3, 4], [5, 1], [2, 3], [4, 5]]


def test_a_pass_is_filled_with_whole_prompts() -> None:
    schedule = scheduler(sequence(1, 20), sequence(2, 30), sequence(3, 40))
    assert step(schedule) == [(1, 0, 20), (2, 0, 30)], "14 tokens are left: less than a page"


def test_peers_take_turns_by_tokens() -> None:
    schedule = scheduler(
        sequence(1, 128, prefill_only=True, peer="a"),
        sequence(2, 128, prefill_only=True, peer="a"),
        sequence(3, 64, prefill_only=True, peer="b"),
        sequence(4, 32, prefill_only=True, peer="b"),
        sequence(5, 96, prefill_only=True, peer="c"),
    )
    assert [schedule.position(SequenceId(n)) for n in (1, 3, 5, 4, 2)] == [0, 0, 0, 3, 4]
    assert [step(schedule) for _ in range(7)] == [
        [(1, 0, 64)],
        [(3, 0, 64)],
        [(5, 0, 64)],
        [(1, 64, 128)],  # a, b and c stand level: the first one
        [(4, 0, 32), (5, 64, 96)],
        [(2, 0, 64)],
        [(2, 64, 128)],
    ]
    assert schedule.plan() is None


def test_priority_orders_one_peers_sequences_only() -> None:
    schedule = scheduler(
        sequence(1, 128, prefill_only=True, peer="a"),
        sequence(2, 64, prefill_only=True, peer="a", priority=1),
        sequence(3, 64, prefill_only=True, peer="a", priority=1),
        sequence(4, 64, prefill_only=True, peer="b"),
    )
    assert [step(schedule) for _ in range(4)] == [
        [(2, 0, 64)],
        [(4, 0, 64)],
        [(3, 0, 64)],
        [(1, 0, 64)],
    ]


def test_a_peer_that_comes_back_keeps_its_debt_and_gets_no_credit() -> None:
    schedule = scheduler(
        sequence(1, 640, prefill_only=True, peer="a"), sequence(2, 64, prefill_only=True, peer="b")
    )
    assert [step(schedule) for _ in range(2)] == [[(1, 0, 64)], [(2, 0, 64)]]
    schedule.add(sequence(3, 640, prefill_only=True, peer="c"))  # starts level with a
    schedule.add(sequence(4, 64, prefill_only=True, peer="b"))
    order = [step(schedule)[0][0] for _ in range(6)]
    assert order == [1, 3, 4, 1, 3, 1]


def test_a_peer_that_asks_one_at_a_time_pays_for_each() -> None:
    small = [sequence(n, 16, prefill_only=True, peer="a") for n in range(1, 30)]
    schedule = scheduler(*small)
    served = {"a": 0, "b": 0}
    for number in range(30, 36):
        schedule.add(sequence(number, 48, prefill_only=True, peer="b"))
        while schedule.waiting_tokens("b"):
            for chunk, start, end in step(schedule):
                served["a" if chunk < 30 else "b"] += end - start
    assert served["b"] == 6 * 48
    assert served["b"] - served["a"] <= 64, "a chunk, as if b had never been idle"


def test_debts_end_when_nobody_waits() -> None:
    schedule = scheduler(
        sequence(1, 640, prefill_only=True, peer="a"), sequence(2, 16, prefill_only=True, peer="b")
    )
    while schedule.waiting:
        step(schedule)
    schedule.add(sequence(3, 128, prefill_only=True, peer="c"))
    schedule.add(sequence(4, 128, prefill_only=True, peer="a"))
    assert [step(schedule)[0][0] for _ in range(4)] == [3, 4, 3, 4]


def test_waiting_tokens_by_peer() -> None:
    schedule = scheduler(
        sequence(1, 100, peer="a"), sequence(2, 50, peer="b"), sequence(3, 30, computed=29)
    )
    assert schedule.waiting_tokens() == 150
    assert schedule.waiting_tokens("a") == 100
    assert schedule.waiting_tokens("nobody") == 0
    step(schedule)
    assert schedule.waiting_tokens("a") == 100 - 48


def test_position_counts_out_what_the_pass_in_flight_does() -> None:
    schedule = scheduler(
        sequence(1, 128, peer="a"), sequence(2, 64, peer="a"), sequence(3, 128, peer="b")
    )
    planned(schedule)
    assert schedule.position(SequenceId(2)) == 2
    schedule.add(sequence(4, 64, peer="b"))
    assert schedule.position(SequenceId(4)) == 2, "level with sequence 2"
    assert schedule.position(SequenceId(2)) == 2
    with pytest.raises(AssertionError):
        schedule.position(SequenceId(5))


def test_removal_while_its_pass_runs_drops_the_result() -> None:
    decoding = sequence(1, 50, computed=49)
    prompt = sequence(2, 40)
    schedule = scheduler(decoding, prompt)
    flight = planned(schedule)
    assert schedule.remove(SequenceId(1))
    assert schedule.remove(SequenceId(2))
    assert not schedule.remove(SequenceId(2))
    assert (schedule.waiting, schedule.running, schedule.waiting_tokens()) == (0, 0, 0)
    assert schedule.in_flight(SequenceId(2)), "the worker still writes its pages"
    with pytest.raises(AssertionError, match="never used twice"):
        schedule.add(sequence(2, 40))
    assert finish(schedule, flight) == (1, 2)
    assert not schedule.in_flight(SequenceId(2))
    assert (decoding.tokens, decoding.computed) == (list(range(50)), 49)
    assert schedule.plan() is None


def test_removal_between_chunks_leaves_nothing() -> None:
    schedule = scheduler(sequence(1, 200, peer="a"), sequence(2, 20, peer="a"))
    step(schedule)
    assert schedule.remove(SequenceId(1))
    assert step(schedule) == [(2, 0, 20)]


def test_what_the_caller_may_not_do() -> None:
    schedule = scheduler(sequence(1, 40))
    for bad in (
        sequence(1, 40),  # twice
        sequence(2, 0),
        sequence(3, 40, computed=40),  # nothing to run
        sequence(4, 40, computed=8),  # no page edge
        sequence(5, 40, computed=39, prefill_only=True),
        sequence(6, 40, pages=2),
    ):
        with pytest.raises(AssertionError):
            schedule.add(bad)
    with pytest.raises(AssertionError, match="no pass is in flight"):
        schedule.commit(1, {})
    flight = planned(schedule)
    with pytest.raises(AssertionError, match="a pass is in flight"):
        schedule.plan()
    with pytest.raises(AssertionError, match="pass 9 ends, 1 is in flight"):
        schedule.commit(9, {})
    with pytest.raises(AssertionError):
        schedule.commit(1, {SequenceId(8): 0})  # nothing was drawn for it
    finish(schedule, flight)


def test_a_sequence_cannot_outgrow_its_pages() -> None:
    schedule = scheduler(sequence(1, 16, pages=1))
    step(schedule)  # draws token 17, whose KV has no page
    with pytest.raises(AssertionError, match="no page for the token"):
        schedule.plan()
