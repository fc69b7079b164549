"""PushMessenger: from a dispatch to layer programs, `drained` and pages given back."""

import pytest

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.pages import PagePool
from pdnode.core.slots import Slot
from pdnode.messenger.dispatch import DispatchLimits
from pdnode.messenger.gate import PageGate
from pdnode.messenger.groups import SourceGroup, SourceRegion
from pdnode.messenger.push import PushMessenger
from pdnode.obs.records import LayerTimes, Records
from pdnode.types import Role
from tests.support.messenger_parts import (
    LAYERS,
    Clock,
    FabricEvent,
    Pair,
    RecordingFabric,
    RecordingSchedule,
    geometry,
    session,
)

HERE = geometry(pages=8)
PAGE = HERE.page_bytes
SLOT, FRESH = Slot(5, 3), Slot(6, 0)


class Node:
    """A prefill node with one peer over two NIC pairs: wire (10, 20) and (11, 21)."""

    def __init__(self, *, tp: int = 1, max_waiting: int = 4, pairs: tuple[Pair, ...] = ()) -> None:
        self.fabric, self.schedule, self.clock = RecordingFabric(), RecordingSchedule(), Clock()
        self.pool, self.records = PagePool(HERE.pages), Records()
        self.there = geometry(pages=16, tp=tp)
        self.dropped: list[str] = []
        self.end, self.outbox = session(
            7,
            peer=Role.DECODE,
            peer_geometry=self.there,
            pairs=pairs or ((20, 10), (21, 11)),
            boot="dboot",
        )
        gate = PageGate(self.pool, max_quarantined=8)
        self.push = PushMessenger(
            geometry=HERE,
            limits=DispatchLimits(vocabulary=100, context_tokens=40, max_waiting=max_waiting),
            fabric=self.fabric,
            groups=[SourceGroup(gate, self.schedule, (SourceRegion(region=2, counter=4),))],
            peer=PeerConfig(),
            drop_link=lambda end, text: self.dropped.append(text),
            records=self.records,
            clock=self.clock,
        )

    def hear(self, frame: wire.Frame) -> list[wire.Frame]:
        self.push.session_frame(self.end, frame)
        return self.outbox.take()

    def event(self, kind: str, transfer: int = 1, *pairs: Pair) -> list[wire.Frame]:
        self.push.fabric_event(FabricEvent(kind, transfer=transfer, text="x", pairs=list(pairs)))
        return self.outbox.take()

    def computed(self) -> None:
        """One request of 6 tokens (2 pages), all of it computed."""
        self.hear(dispatch())
        self.schedule.plan(1, 6, base=0)
        self.schedule.compute(1)
        self.outbox.take()
        self.fabric.take()

    @property
    def idle(self) -> bool:
        return (self.push.open_pushes, self.pool.counts.free) == (0, HERE.pages)


def dispatch(
    key: str = "dboot:1",
    *,
    tokens: int = 6,
    last_token: int = 5,
    pages: tuple[tuple[int, int], ...] = ((3, 1), (9, 1)),
    **changes: object,
) -> wire.Dispatch:
    values: dict[str, object] = {
        "key": key,
        "request_id": "r",
        "tokens": [*range(tokens - 1), last_token][:tokens],
        "pages": [wire.PageRun(start, count) for start, count in pages],
        "first_page": 0,
        "immediate": SLOT.immediate,
        "context_slot": -1,
        "deadline_s": 30.0,
        "priority": 0,
    }
    return wire.Dispatch(**(values | changes))  # type: ignore[arg-type]


def drained(frames: list[wire.Frame]) -> list[str]:
    return [frame.key for frame in frames if isinstance(frame, wire.Drained)]


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_dispatch_becomes_programs_and_ends_with_drained(node: Node) -> None:
    assert node.hear(dispatch()) == [wire.Accepted("dboot:1", 0)]
    begun = node.schedule.begun[1]
    assert (begun.tokens, begun.peer) == ([0, 1, 2, 3, 4, 5], "peer")
    assert node.pool.counts.used == 2
    source = begun.pages[0].start
    node.schedule.plan(1, 4, base=10)
    stride = (LAYERS, 2, 8 * PAGE, PAGE, 0, 0, 16 * PAGE, PAGE, 0, PAGE, True)
    assert node.fabric.take() == [
        ("open_transfer", 1, 7, SLOT.immediate),
        ("submit", 1, 4, 10, *stride, ((source, 3, 1),), 0),
    ]
    node.clock.now += 2.0
    node.schedule.compute(1)
    node.schedule.plan(1, 6, base=12)
    assert node.fabric.take() == [
        ("submit", 1, 4, 12, *stride, ((source + 1, 9, 1),), 0),
        ("finish", 1),
    ]
    node.schedule.compute(1)
    assert node.outbox.take() == [
        wire.Progress("dboot:1", 4, 0.0, 2.0),
        wire.Progress("dboot:1", 6, 0.0, 2.0),
    ]
    assert not node.idle
    node.fabric.rows[1] = [(0, 1, 10, 20, 30, PAGE, 1), (1, 0, 40, 50, 60, PAGE, 1)]
    assert node.event("drained") == [wire.Drained("dboot:1", 0.0, 2.0)]
    assert node.idle
    (record,) = node.records.transfers
    assert (record.outcome, record.pages, record.bytes, record.writes) == (
        "drained",
        2,
        2 * PAGE,
        2,
    )
    assert record.layers == (
        LayerTimes(0, 1, 10, 20, 30, PAGE, 1),
        LayerTimes(1, 0, 40, 50, 60, PAGE, 1),
    )
    assert node.push.figures.bytes == {"peer": 2 * PAGE}


def test_programs_to_two_ranks_carry_their_heads() -> None:
    node = Node(tp=2)
    node.hear(dispatch())
    node.schedule.plan(1, 6, base=0)
    source = node.schedule.begun[1].pages[0].start
    head, spans = HERE.head_bytes, ((source, 3, 1), (source + 1, 9, 1))
    assert [call[4:] for call in node.fabric.take() if call[0] == "submit"] == [
        (LAYERS, 2, 8 * PAGE, PAGE, 0, 0, 16 * head, head, 0, head, False, spans, 0),
        (LAYERS, 2, 8 * PAGE, PAGE, head, 1, 16 * head, head, 0, head, False, spans, 0),
    ]


def test_neighbours_on_both_sides_are_one_span(node: Node) -> None:
    node.hear(dispatch(pages=((5, 2),)))
    node.schedule.plan(1, 6, base=0)
    start = node.schedule.begun[1].pages[0].start
    assert node.fabric.take()[1][-2] == ((start, 5, 2),)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (dispatch(pages=((3, 1), (16, 1))), "pages: run 16+1 is outside 0 to 15"),
        (dispatch(pages=((3, 1), (15, 2))), "pages: run 15+2 is outside 0 to 15"),
        (dispatch(pages=((3, 1), (3, 1))), "pages: page 3 is named twice"),
        (dispatch(pages=((3, 1),)), "pages: 1 given, 2 needed"),
        (dispatch(pages=((3, 3),)), "pages: 3 given, 2 needed"),
        (dispatch(tokens=0, pages=()), "tokens: 0, this node takes 1 to 32"),
        (dispatch(tokens=33, pages=((0, 9),)), "tokens: 33, this node takes 1 to 32"),
        (dispatch(last_token=100), "tokens: ids must be 0 to 99"),
        (dispatch(immediate=0), "immediate: slot must be 1 to 4095 and weight 0"),
        (dispatch(immediate=SLOT.immediate + 1), "immediate: slot must be 1 to 4095 and weight 0"),
        (dispatch(first_page=1), "first_page: 1, only 0 is supported"),
        (dispatch(context_slot=0), "context_slot: 0, only -1 is supported"),
        (dispatch(verify="once"), "verify: 'once'; allowed: off"),
        (dispatch("other:1"), "key: must begin with the boot id dboot"),
    ],
)
def test_a_forged_dispatch_leaves_nothing(node: Node, frame: wire.Dispatch, text: str) -> None:
    failed = wire.Failed(frame.key, "rejected", text, [])
    assert node.hear(frame) == [failed, wire.Drained(frame.key, 0.0, 0.0)]
    assert node.idle
    assert (node.fabric.calls, node.schedule.begun) == ([], {})
    assert node.push.figures.refused == {"rejected": 1}


def test_a_key_in_use_is_refused_and_the_first_goes_on(node: Node) -> None:
    """No `drained`: it would free pages that the first one writes to."""
    node.hear(dispatch())
    assert node.hear(dispatch()) == [wire.Failed("dboot:1", "rejected", "key: in use", [])]
    assert (node.push.open_pushes, len(node.schedule.begun)) == (1, 1)
    other, outbox = session(
        8, peer=Role.DECODE, peer_geometry=node.there, pairs=((20, 10),), boot="dboot"
    )
    node.push.session_frame(other, dispatch())
    text = "key: in use by another session"
    assert outbox.take() == [
        wire.Failed("dboot:1", "rejected", text, []),
        wire.Drained("dboot:1", 0.0, 0.0),
    ]
    assert node.push.open_pushes == 1


def test_overload_and_draining_are_refused_by_name() -> None:
    node = Node(max_waiting=1)
    node.hear(dispatch())
    refused, done = node.hear(dispatch("dboot:2"))
    assert refused == wire.Failed("dboot:2", "overloaded", "1 requests here, at most 1", [])
    assert done == wire.Drained("dboot:2", 0.0, 0.0)
    node.push.draining = True
    assert node.hear(dispatch("dboot:3"))[0].cause == "draining"
    assert node.push.figures.refused == {"overloaded": 1, "draining": 1}


def test_cancel_while_it_waits_for_pages(node: Node) -> None:
    node.hear(dispatch(tokens=32, pages=((0, 8),)))
    node.hear(dispatch("dboot:2"))
    assert node.push.waiting_tokens() == 6
    assert drained(node.hear(wire.Cancel("dboot:2"))) == ["dboot:2"]
    assert (node.push.open_pushes, node.push.waiting_tokens()) == (1, 0)
    node.hear(wire.Cancel("dboot:1"))
    assert node.idle
    assert len(node.schedule.begun) == 1


def test_pages_that_come_back_start_the_next_in_the_queue(node: Node) -> None:
    node.hear(dispatch(tokens=32, pages=((0, 8),)))
    node.hear(dispatch("dboot:2"))
    assert len(node.schedule.begun) == 1
    node.hear(wire.Cancel("dboot:1"))
    assert node.schedule.begun[2].tokens == [0, 1, 2, 3, 4, 5]


def test_cancel_in_a_pass_says_drained_at_once_and_keeps_the_pages(node: Node) -> None:
    node.hear(dispatch())
    node.schedule.plan(1, 4, base=0)
    node.fabric.take()
    assert node.hear(wire.Cancel("dboot:1")) == []
    assert (node.fabric.take(), node.schedule.removed) == ([("stop", 1)], [1])
    assert drained(node.event("drained")) == ["dboot:1"]
    assert node.pool.counts.used == 2, "the pass still writes them"
    node.schedule.compute(1)
    assert node.idle
    assert node.records.transfers[0].outcome == "cancelled"
    assert node.outbox.take() == []


def test_cancel_while_writes_are_outstanding(node: Node) -> None:
    node.computed()
    assert node.hear(wire.Cancel("dboot:1")) == []
    assert not node.idle
    assert drained(node.event("drained")) == ["dboot:1"]
    assert node.idle


def test_cancel_of_an_unknown_request_is_answered(node: Node) -> None:
    assert node.hear(wire.Cancel("dboot:9")) == [wire.Drained("dboot:9", 0.0, 0.0)]
    failed, done = node.hear(wire.Regrant("dboot:9", FRESH.immediate))
    assert (failed.cause, done.key) == ("unknown", "dboot:9")


def test_a_failed_pair_is_fenced_told_once_and_replayed(node: Node) -> None:
    node.computed()
    node.hear(dispatch("dboot:2", pages=((0, 2),)))
    node.schedule.plan(2, 4, base=2)
    node.fabric.take()
    assert node.event("failed", 1, (21, 11)) == [wire.NicDown((11, 21), "x")]
    assert node.fabric.take() == [("fence", 7, (21, 11))]
    assert node.end.pairs == ((20, 10),)
    assert node.event("failed", 2, (21, 11)) == [], "told already"
    assert node.event("settled", 1, (21, 11)) == []
    assert node.hear(wire.NicFenced((11, 21))) == []
    assert node.fabric.take() == []
    node.hear(wire.Regrant("dboot:1", FRESH.immediate))
    calls = node.fabric.take()
    assert [call[:4] for call in calls] == [
        ("open_transfer", 3, 7, FRESH.immediate),
        ("submit", 3, -1, 0),
        ("finish", 3),
    ]
    assert drained(node.event("drained", 3)) == ["dboot:1"]
    # The second one: its transfer settles after regrant, while a pass runs.
    node.hear(wire.Regrant("dboot:2", Slot(7, 0).immediate))
    assert node.fabric.take() == [("close_transfer", 1), ("close_transfer", 3)]
    node.event("settled", 2, (21, 11))
    assert [call[:4] for call in node.fabric.take()] == [
        ("open_transfer", 4, 7, Slot(7, 0).immediate),
        ("submit", 4, 4, 2),
    ]


def test_a_pair_that_failed_only_later_is_fenced_too(node: Node) -> None:
    """`settled` names all pairs with errors; `drained` waits for the fence of each."""
    node = Node(pairs=((20, 10), (21, 11), (22, 12)))
    node.computed()
    node.event("failed", 1, (20, 10))
    node.hear(wire.NicFenced((10, 20)))
    assert node.hear(wire.Cancel("dboot:1")) == []
    assert node.event("settled", 1, (20, 10), (21, 11)) == [wire.NicDown((11, 21), "x")]
    assert drained(node.hear(wire.NicFenced((11, 21)))) == ["dboot:1"]
    assert node.idle


def test_a_pair_that_has_come_back_is_another_one(node: Node) -> None:
    """`settled` names it as well, since the transfer's writes over it had failed before."""
    node.computed()
    assert node.event("failed", 1, (20, 10)) == [wire.NicDown((10, 20), "x")]
    node.hear(wire.NicFenced((10, 20)))
    node.end.pairs = ((20, 10), (21, 11))
    assert node.event("settled", 1, (20, 10), (21, 11)) == [wire.NicDown((11, 21), "x")]
    assert node.end.pairs == ((20, 10),)


def test_without_another_pair_the_request_fails_and_names_it() -> None:
    node = Node(pairs=((20, 10),))
    node.computed()
    assert node.event("failed", 1, (20, 10)) == [wire.Failed("dboot:1", "write", "x", [(10, 20)])]
    assert node.schedule.removed == [1]
    assert drained(node.event("settled", 1, (20, 10))) == []
    assert drained(node.hear(wire.NicFenced((10, 20)))) == ["dboot:1"]
    assert node.idle
    assert node.push.figures.failures == {"write": 1}


def test_a_device_group_without_a_way_waits_for_the_regrant_that_a_lost_pair_brings(
    node: Node,
) -> None:
    """The core names no pair: nothing was posted. Other pairs may well reach the rank."""
    node.computed()
    node.push.pair_lost(node.end, (20, 10), "died")
    assert node.outbox.take() == [wire.NicDown((10, 20), "died")]
    node.fabric.take()
    assert node.event("failed", 1) == []
    assert node.event("settled", 1) == []
    node.hear(wire.Regrant("dboot:1", FRESH.immediate))
    assert [call[0] for call in node.fabric.take()] == ["open_transfer", "submit", "finish"]
    # Of that one no pair was lost: no regrant would come.
    (failed,) = (one for one in node.event("failed", 2) if isinstance(one, wire.Failed))
    assert (failed.cause, failed.pairs) == ("write", [])


def test_no_answer_to_nic_down_drops_the_link(node: Node) -> None:
    node.computed()
    node.event("failed", 1, (20, 10))
    node.clock.now += 10.0
    node.push.tick()
    assert node.dropped == []
    node.clock.now += 0.1
    node.push.tick()
    node.push.tick()
    assert node.dropped == ["dboot:1: no answer to nic_down within 10 s"]
    assert not node.idle, "nothing is freed by time"


def test_a_lost_pair_is_told_and_a_pair_fenced_there_is_closed_here(node: Node) -> None:
    node.push.pair_lost(node.end, (20, 10), "died")
    assert node.outbox.take() == [wire.NicDown((10, 20), "died")]
    node.hear(wire.NicFenced((11, 21)))
    assert node.fabric.take() == [("fence", 7, (20, 10)), ("fence", 7, (21, 11))]
    assert node.end.pairs == ()


def test_the_core_refuses_a_program(node: Node) -> None:
    node.hear(dispatch())
    node.fabric.refuse = {"submit"}
    node.schedule.plan(1, 6, base=0)
    assert node.outbox.take() == [wire.Failed("dboot:1", "write", "submit: refused", [])]
    assert node.fabric.take() == [("open_transfer", 1, 7, SLOT.immediate), ("stop", 1)]
    assert drained(node.event("drained")) == ["dboot:1"]
    node.schedule.compute(1)
    assert node.idle


def test_the_core_refuses_a_transfer(node: Node) -> None:
    node.hear(dispatch())
    node.fabric.refuse = {"open_transfer"}
    node.schedule.plan(1, 6, base=0)
    failed, done = node.outbox.take()
    assert (failed.cause, done.key) == ("write", "dboot:1")
    node.schedule.compute(1)
    assert node.idle
    assert node.fabric.take() == []


def test_a_forged_regrant_fails_the_request(node: Node) -> None:
    node.computed()
    (failed,) = node.hear(wire.Regrant("dboot:1", 5))
    assert (failed.cause, failed.text[:10]) == ("write", "immediate:")
    assert node.fabric.take() == [("stop", 1)]
    assert drained(node.event("drained")) == ["dboot:1"]


@pytest.mark.parametrize("phase", ["waits for pages", "queued", "in a pass", "computed", "failed"])
def test_a_lost_session_frees_when_nothing_reads_the_pages(node: Node, phase: str) -> None:
    if phase == "waits for pages":
        (others,) = node.pool.reserve(8)
        node.hear(dispatch())
    elif phase == "computed":
        node.computed()
    else:
        node.hear(dispatch())
    if phase in ("in a pass", "failed"):
        node.schedule.plan(1, 6, base=0)
    if phase == "failed":
        node.event("failed", 1, (20, 10))
    node.outbox.take()
    node.end.up = False
    node.push.session_lost(node.end)
    if phase == "failed":
        node.event("settled", 1, (20, 10))
    elif phase in ("in a pass", "computed"):
        node.event("drained")
    if phase in ("in a pass", "failed"):
        assert node.pool.counts.used == 2
        node.schedule.compute(1)
    assert node.outbox.take() == []
    assert node.push.open_pushes == 0
    if phase == "waits for pages":
        node.pool.release((others,))
    assert node.idle
    assert node.records.transfers[0].outcome == "link_lost"


def test_the_engine_dies(node: Node) -> None:
    node.hear(dispatch())
    node.schedule.plan(1, 4, base=0)
    node.hear(dispatch("dboot:2"))
    node.push.engine_failed("worker died")
    frames = node.outbox.take()
    assert [type(frame).__name__ for frame in frames] == ["Failed", "Failed", "Drained"]
    assert {frame.cause for frame in frames[:2]} == {"engine"}
    assert drained(frames) == ["dboot:2"]
    assert drained(node.event("drained")) == ["dboot:1"]
    assert node.idle
    assert node.push.figures.failures == {"engine": 2}


def test_a_queued_request_hears_that_the_queue_moves(node: Node) -> None:
    node.hear(dispatch())
    node.hear(dispatch("dboot:2"))
    node.clock.now += 8.0
    node.push.tick()
    assert node.outbox.take() == [], "nothing was computed"
    node.schedule.plan(1, 4, base=0)
    node.schedule.compute(1)
    node.outbox.take()
    node.push.tick()
    assert node.outbox.take() == [wire.Accepted("dboot:2", 1)]
    node.push.tick()
    assert node.outbox.take() == []


def test_a_request_between_two_chunks_hears_that_others_get_on(node: Node) -> None:
    node.hear(dispatch())
    node.hear(dispatch("dboot:2"))
    node.schedule.plan(1, 4, base=0)
    node.schedule.compute(1)
    node.schedule.plan(2, 4, base=2)
    node.clock.now += 8.0
    node.outbox.take()
    node.push.tick()
    assert node.outbox.take() == [], "dboot:1 was told of all that was computed"
    node.schedule.compute(2)
    node.outbox.take()
    node.push.tick()
    assert node.outbox.take() == [wire.Accepted("dboot:1", 0)]


def test_events_and_frames_of_others_change_nothing(node: Node) -> None:
    node.computed()
    node.event("drained", 99)
    other, outbox = session(8, peer=Role.DECODE, peer_geometry=node.there, pairs=((20, 10),))
    node.push.session_frame(other, wire.Cancel("dboot:1"))
    assert drained(outbox.take()) == ["dboot:1"]
    node.push.session_lost(other)
    assert node.push.open_pushes == 1
    assert node.hear(wire.Undrain()) == []
