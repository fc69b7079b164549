"""PullMessenger: from granted pages and a slot to complete pages, and what is given back when."""

import asyncio

import pytest

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.grant import GrantState
from pdnode.core.pages import PagePool
from pdnode.core.slots import Slot, SlotPool
from pdnode.core.transfer import FailCause
from pdnode.messenger.gate import PageGate
from pdnode.messenger.pull import Outcome, Pull, PullMessenger
from pdnode.types import BootId, NodeId, Role
from tests.support.messenger_parts import (
    LAYERS,
    Clock,
    FabricEvent,
    RecordingFabric,
    geometry,
    session,
)

HERE = geometry(pages=16)
SLOTS = 3


class Node:
    """A decode node with one peer over two NIC pairs, (10, 20) and (11, 21)."""

    def __init__(self, *, peer_tp: int = 1) -> None:
        self.fabric, self.clock, self.pool = RecordingFabric(), Clock(), PagePool(HERE.pages)
        self.slots, self.dropped = SlotPool(SLOTS), list[str]()
        self.there = geometry(pages=8, tp=peer_tp)
        self.end, self.outbox = session(
            7, peer=Role.PREFILL, peer_geometry=self.there, pairs=((10, 20), (11, 21))
        )
        self.pulls = PullMessenger(
            boot=BootId("dboot"),
            geometry=HERE,
            fabric=self.fabric,
            gates=[PageGate(self.pool, max_quarantined=16)],
            slots=self.slots,
            peer=PeerConfig(),
            drop_link=lambda end, text: self.dropped.append(text),
            clock=self.clock,
        )

    def begin(self, prompt: int = 10, pages: int = 4) -> Pull:
        slot = self.slots.take()
        assert slot is not None
        return self.pulls.begin(
            self.end,
            request_id="r",
            prompt=tuple(range(prompt)),
            pages=self.pool.reserve(pages),
            slot=slot,
            priority=2,
        )

    def hear(self, frame: wire.Frame) -> list[wire.Frame]:
        self.pulls.session_frame(self.end, frame)
        return self.outbox.take()

    def reach(self, slot: Slot, kind: str = "reached") -> None:
        self.pulls.fabric_event(FabricEvent(kind, slot=slot.slot, generation=slot.generation))

    @property
    def idle(self) -> bool:
        free = (self.pool.counts.free, self.slots.taken, self.pulls.open_pulls)
        return free == (HERE.pages, 0, 0)


@pytest.fixture
async def node() -> Node:
    return Node()


def drained(key: str = "dboot:1") -> wire.Drained:
    return wire.Drained(key, 0.5, 1.5)


async def test_a_pull_arms_dispatches_completes_and_frees(node: Node) -> None:
    pull = node.begin()
    units = 3 * LAYERS  # the last of 10 prompt tokens is not sent: 9 tokens, 3 of the 4 pages
    assert node.fabric.take() == [("arm", 1, 0, 7, units)]
    assert node.outbox.take() == [
        wire.Dispatch(
            key="dboot:1",
            request_id="r",
            tokens=list(range(9)),
            pages=[wire.PageRun(0, 3)],
            first_page=0,
            immediate=Slot(1, 0).immediate,
            context_slot=-1,
            deadline_s=30.0,
            priority=2,
        )
    ]
    assert node.pool.counts.reserved == 4
    assert node.pulls.outstanding_tokens(NodeId("peer")) == 9
    node.hear(wire.Accepted("dboot:1", 0))
    node.hear(wire.Progress("dboot:1", 9, 0.25, 1.0))
    node.clock.now += 1.0
    node.reach(Slot(1, 0))
    assert await pull.outcome == Outcome(complete=True)
    assert (pull.queue_s, pull.complete_at, node.pool.counts.used) == (0.25, 101.0, 4)
    assert node.pulls.outstanding_tokens(NodeId("peer")) == 0
    node.hear(drained())
    node.pulls.end(pull)
    assert node.idle
    assert node.fabric.take() == [("disarm", 1)]
    assert node.pulls.figures.bytes == {"peer": 3 * LAYERS * HERE.page_bytes}
    assert (pull.queue_s, pull.prefill_s) == (0.5, 1.5)


async def test_two_source_ranks_count_twice() -> None:
    node = Node(peer_tp=2)
    node.begin()
    assert node.fabric.take() == [("arm", 1, 0, 7, 2 * 3 * LAYERS)]


async def test_pages_that_are_read_wait_for_drained(node: Node) -> None:
    pull = node.begin()
    node.reach(Slot(1, 0))
    node.pulls.end(pull)
    assert (node.pool.counts.quarantined, node.slots.taken) == (4, 1)
    node.hear(drained())
    assert node.idle


async def test_failed_frees_nothing_before_drained(node: Node) -> None:
    pull = node.begin()
    node.hear(wire.Failed("dboot:1", "engine", "worker died", []))
    assert await pull.outcome == Outcome(False, FailCause.ENGINE, "worker died")
    assert node.pool.counts.quarantined == 4
    node.hear(drained())
    assert node.idle
    assert node.pulls.figures.failures == {"engine": 1}


@pytest.mark.parametrize("cause", ["sunspots", FailCause.CORRUPT])
async def test_a_cause_that_a_peer_may_not_name_is_a_write_failure(node: Node, cause: str) -> None:
    """Unknown ones are of a newer peer; that pages are corrupt is for this node to find."""
    pull = node.begin()
    node.hear(wire.Failed("dboot:1", cause, "x" * 16_000, []))
    outcome = await pull.outcome
    assert (outcome.cause, len(outcome.text)) == (FailCause.WRITE, wire.MAX_TEXT)


async def test_failed_pairs_are_fenced_and_answered(node: Node) -> None:
    node.begin()
    other = node.begin()
    node.fabric.take()
    node.outbox.take()
    node.hear(wire.Failed("dboot:1", "write", "x", [(10, 20), (99, 99)]))
    assert node.fabric.take() == [("fence", 7, (10, 20))], "each once, and none that is not ours"
    node.pulls.pair_fenced(node.end, (10, 20))
    assert node.outbox.take() == [
        wire.NicFenced((10, 20)),
        wire.Regrant("dboot:2", Slot(3, 0).immediate),
    ]
    assert other.grant.slots == [Slot(2, 0), Slot(3, 0)]
    assert node.fabric.take() == [("arm", 3, 0, 7, 3 * LAYERS)], "armed before the peer hears"


async def test_nic_down_fences_once_then_regrants_or_releases(node: Node) -> None:
    complete = node.begin(prompt=3, pages=1)
    node.reach(Slot(1, 0))
    waiting = node.begin()
    node.fabric.take()
    node.outbox.take()
    assert node.hear(wire.NicDown((11, 21), "x")) == []
    node.pulls.pair_lost(node.end, (11, 21), "died")
    assert node.hear(wire.NicDown((11, 21), "x")) == []
    assert node.fabric.take() == [("fence", 7, (11, 21))]
    node.end.pairs = ((10, 20),)  # the link forgets the pair first
    node.pulls.pair_fenced(node.end, (11, 21))
    assert node.outbox.take() == [
        wire.NicFenced((11, 21)),
        wire.Cancel(complete.grant.key),
        wire.Regrant(waiting.grant.key, Slot(3, 0).immediate),
    ]
    assert node.hear(wire.NicDown((11, 21), "late")) == []
    node.pulls.pair_fenced(node.end, (11, 21))
    assert node.outbox.take() == []
    node.reach(Slot(2, 0))
    assert not waiting.outcome.done(), "the old count does not let in while a replay may write"
    node.reach(Slot(3, 0))
    assert await waiting.outcome == Outcome(complete=True)
    node.fabric.take()
    node.pulls.end(waiting)
    node.hear(drained(waiting.grant.key))
    assert node.fabric.take() == [("disarm", 2), ("disarm", 3)]
    assert (node.slots.taken, node.pulls.open_pulls) == (1, 1)


async def test_no_slot_left_for_a_replay_gives_up(node: Node) -> None:
    pulls = [node.begin(), node.begin(), node.begin()]
    node.hear(wire.NicDown((10, 20), "x"))
    node.outbox.take()
    node.pulls.pair_fenced(node.end, (10, 20))
    assert [type(frame).__name__ for frame in node.outbox.take()] == ["NicFenced", *["Cancel"] * 3]
    assert {(await pull.outcome).cause for pull in pulls} == {FailCause.OVERLOADED}


async def test_the_last_connection_takes_the_link_with_it(node: Node) -> None:
    node.end.pairs = ((10, 20),)
    node.begin()
    node.hear(wire.NicDown((10, 20), "x"))
    node.pulls.pair_fenced(node.end, (10, 20))
    assert node.dropped == ["no connection is left"]


async def test_drained_that_crosses_a_regrant(node: Node) -> None:
    """All writes came back with success, then the peer hears of a regrant and knows nothing."""
    pull = node.begin()
    node.hear(wire.NicDown((10, 20), "x"))
    node.pulls.pair_fenced(node.end, (10, 20))
    node.hear(drained())
    node.hear(wire.Failed("dboot:1", "unknown", "no such request here", []))
    node.reach(Slot(1, 0))
    assert await pull.outcome == Outcome(complete=True)
    node.pulls.end(pull)
    assert node.idle


async def test_abandon_in_every_phase(node: Node) -> None:
    dispatched, complete, ended = node.begin(), node.begin(), node.begin()
    node.reach(Slot(2, 0))
    node.reach(Slot(3, 0))
    node.outbox.take()
    node.pulls.end(ended)
    for pull in (dispatched, complete, ended):
        node.pulls.abandon(pull)
        node.pulls.abandon(pull)
    assert dispatched.outcome.cancelled()
    assert node.outbox.take() == [wire.Cancel("dboot:1")]
    assert node.pool.counts.quarantined == 12
    for number in (1, 2, 3):
        node.hear(drained(f"dboot:{number}"))
    assert node.idle


async def test_a_cancelled_task_does_not_lose_complete_pages(node: Node) -> None:
    """The count is reached between the cancellation and the task's turn to abandon."""
    pull = node.begin()
    task = asyncio.create_task(_wait(pull))
    await asyncio.sleep(0)
    task.cancel()
    assert pull.outcome.cancelled()
    node.reach(Slot(1, 0))
    assert node.pool.counts.quarantined == 4
    node.pulls.abandon(pull)
    node.hear(drained())
    assert node.idle
    with pytest.raises(asyncio.CancelledError):
        await task


async def _wait(pull: Pull) -> None:
    await pull.outcome


async def test_overshoot_before_completion_fails(node: Node) -> None:
    pull = node.begin()
    node.reach(Slot(1, 0), "overshoot")
    assert (await pull.outcome).cause is FailCause.OVERSHOOT
    assert node.pool.counts.quarantined == 4


async def test_overshoot_after_completion_breaks_the_request_loudly(node: Node) -> None:
    told: list[str] = []
    pull = node.begin()
    node.reach(Slot(1, 0))
    pull.broken = told.append
    node.reach(Slot(1, 0), "overshoot")
    assert told == ["more page writes arrived than were planned"]
    assert pull.grant.reading, "whoever reads ends it"


async def test_overshoot_before_the_reader_had_its_turn(node: Node) -> None:
    pull = node.begin()
    node.reach(Slot(1, 0))
    node.reach(Slot(1, 0), "overshoot")
    assert not pull.grant.reading
    assert node.pool.counts.quarantined == 4


async def test_events_of_other_generations_are_nobodys(node: Node) -> None:
    pull = node.begin()
    node.reach(Slot(1, 1))
    node.reach(Slot(2, 0))
    assert not pull.outcome.done()


@pytest.mark.parametrize("phase", ["dispatched", "failed", "cancelling", "reading", "ended"])
async def test_a_lost_session_gives_pages_back_only_after_its_fence(node: Node, phase: str) -> None:
    pull = node.begin()
    if phase in ("reading", "ended"):
        node.reach(Slot(1, 0))
    if phase == "ended":
        node.pulls.end(pull)
    elif phase == "failed":
        node.hear(wire.Failed("dboot:1", "engine", "x", []))
    elif phase == "cancelling":
        node.pulls.abandon(pull)
    node.end.up = False
    node.outbox.take()
    node.pulls.session_lost(node.end, "silent for 3 s", silent=True)
    if phase == "dispatched":
        assert await pull.outcome == Outcome(False, FailCause.SILENT, "silent for 3 s")
    node.clock.now += 1000.0
    node.pulls.tick()
    assert (node.pool.counts.free, node.slots.taken, node.dropped) == (12, 1, [])
    node.pulls.session_fenced(node.end)
    if phase == "reading":
        assert (node.pool.counts.used, pull.grant.state) == (4, GrantState.COMPLETE)
        node.pulls.end(pull)
    assert node.idle
    assert node.outbox.take() == []


async def test_other_sessions_are_not_touched(node: Node) -> None:
    pull = node.begin()
    other, _ = session(8, peer=Role.PREFILL, peer_geometry=node.there, pairs=((10, 20),))
    node.pulls.session_frame(other, drained())
    node.pulls.session_lost(other, "x")
    node.pulls.session_fenced(other)
    assert (pull.grant.state, pull.grant.drained) == (GrantState.DISPATCHED, False)


async def test_a_stalled_request_is_cancelled_then_the_link_is_dropped(node: Node) -> None:
    pull = node.begin()
    node.outbox.take()
    node.clock.now += 29.0
    node.hear(wire.Accepted("dboot:1", 3))
    node.clock.now += 29.0
    node.hear(wire.Progress("dboot:1", 4, 0.0, 0.0))
    node.clock.now += 29.0
    node.hear(wire.Progress("dboot:1", 4, 0.0, 0.0))  # no progress
    node.pulls.tick()
    assert not pull.outcome.done()
    node.clock.now += 1.5
    node.pulls.tick()
    assert (await pull.outcome).cause is FailCause.STALLED
    assert node.outbox.take() == [wire.Cancel("dboot:1")]
    node.clock.now += 10.5
    node.pulls.tick()
    node.pulls.tick()
    assert node.dropped == ["dboot:1: no drained within 10 s"]
    assert node.pool.counts.quarantined == 4, "nothing is freed by time"


async def test_pages_that_land_are_progress(node: Node) -> None:
    """As in a pass of a minute, or over a wire that is slow: nothing else says that it goes on."""
    pull = node.begin()
    for units in (1, 2, 5):
        node.clock.now += 29.0
        node.fabric.landed[1] = units
        node.pulls.tick()
    assert not pull.outcome.done()
    node.clock.now += 29.0
    node.pulls.tick()
    node.clock.now += 1.5
    node.pulls.tick()
    assert (await pull.outcome).cause is FailCause.STALLED


async def test_what_lands_under_a_new_immediate_is_progress_from_its_first_unit(node: Node) -> None:
    pull = node.begin()
    node.fabric.landed[1] = 5
    node.pulls.tick()
    node.hear(wire.NicDown((11, 21), "x"))
    node.pulls.pair_fenced(node.end, (11, 21))
    assert pull.grant.slot == Slot(2, 0)
    node.clock.now += 29.0
    node.fabric.landed[2] = 1
    node.pulls.tick()
    node.clock.now += 29.0
    node.pulls.tick()
    assert not pull.outcome.done()


async def test_slots_are_waited_for_in_turn(node: Node) -> None:
    taken = [await node.pulls.take_slot() for _ in range(SLOTS)]
    waiters = [asyncio.create_task(node.pulls.take_slot()) for _ in range(4)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    node.pulls.return_slot(taken[0])
    assert await waiters[1] == Slot(1, 1)
    node.pulls.return_slot(taken[1])
    waiters[2].cancel()  # it has its slot, but not its turn
    await asyncio.sleep(0)
    assert await waiters[3] == Slot(2, 2), "passed on"
    node.pulls.return_slot(taken[2])
    assert (node.slots.free, node.slots.taken) == (1, 2)
    for cancelled in (waiters[0], waiters[2]):
        with pytest.raises(asyncio.CancelledError):
            await cancelled


async def test_who_watches_sees_what_has_landed(node: Node) -> None:
    pull = node.begin()
    node.fabric.landed[1] = 4
    assert node.pulls.units(pull) == (4, 3 * LAYERS)
    node.fabric.landed[1] = 99  # more than planned is an overshoot, and not more than all
    assert node.pulls.units(pull) == (6, 6)
    assert (pull.over, pull.quarantined) == (False, False)
    node.reach(Slot(1, 0))
    assert (pull.over, pull.quarantined) == (False, False)  # `drained` is owed, and it is read
    node.pulls.end(pull)
    assert (pull.over, pull.quarantined) == (False, True)
    assert list(node.pulls.open()) == [pull]
    node.hear(drained())
    assert list(node.pulls.open()) == []


async def test_a_reload_holds_for_attempts_to_come(node: Node) -> None:
    node.begin()
    node.pulls.reload(PeerConfig(request_stall_s=7.0))
    node.begin()
    assert [frame.deadline_s for frame in node.outbox.take()] == [30.0, 7.0]  # type: ignore[union-attr]


async def test_a_trace_goes_with_the_dispatch(node: Node) -> None:
    slot = node.slots.take()
    assert slot is not None
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    node.pulls.begin(
        node.end,
        request_id="r",
        prompt=(1, 2),
        pages=node.pool.reserve(1),
        slot=slot,
        priority=0,
        traceparent=trace,
    )
    [dispatch] = node.outbox.take()
    assert isinstance(dispatch, wire.Dispatch)
    assert dispatch.traceparent == trace
