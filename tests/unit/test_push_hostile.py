"""PushMessenger against a peer that lies or asks for too much: every memory has a bound."""

import pytest

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.pages import PagePool
from pdnode.messenger.dispatch import MAX_REPLAYS, DispatchLimits
from pdnode.messenger.gate import PageGate
from pdnode.messenger.groups import SourceGroup, SourceRegion
from pdnode.messenger.places import Places
from pdnode.messenger.push import PushMessenger
from pdnode.messenger.push_figures import MAX_NAMED_PEERS, OTHER_PEERS, PushFigures
from pdnode.messenger.session import PeerSession
from pdnode.obs.records import Records
from pdnode.types import NodeId, Role
from tests.support.messenger_parts import (
    Clock,
    FabricEvent,
    Outbox,
    RecordingFabric,
    RecordingSchedule,
    geometry,
    session,
)

HERE, THERE = geometry(pages=8), geometry(pages=64)
IMMEDIATE = 1 << 20


class Node:
    """A prefill node; `peer(name)` connects one more decode node."""

    def __init__(self, *, max_waiting: int = 8) -> None:
        self.fabric, self.schedule = RecordingFabric(), RecordingSchedule()
        gate = PageGate(PagePool(HERE.pages), max_quarantined=8)
        self.push = PushMessenger(
            geometry=HERE,
            limits=DispatchLimits(vocabulary=100, context_tokens=40, max_waiting=max_waiting),
            fabric=self.fabric,
            groups=[SourceGroup(gate, self.schedule, (SourceRegion(region=2, counter=4),))],
            peer=PeerConfig(),
            drop_link=lambda end, text: None,
            records=Records(),
            clock=Clock(),
        )
        self._peers = 0

    def peer(self, name: str) -> tuple[PeerSession, Outbox]:
        self._peers += 1
        end, outbox = session(
            self._peers,
            peer=Role.DECODE,
            peer_geometry=THERE,
            pairs=((20, 10), (21, 11)),
            boot=name,
            node=name,
        )
        self.push.session_up(end)
        return end, outbox

    def flood(self, end: PeerSession, outbox: Outbox, count: int) -> int:
        """How many of `count` dispatches are accepted."""
        for number in range(count):
            self.push.session_frame(end, dispatch(f"{end.node}:{number}"))
        return sum(isinstance(frame, wire.Accepted) for frame in outbox.take())


def dispatch(key: str, **changes: object) -> wire.Dispatch:
    values: dict[str, object] = {
        "key": key,
        "request_id": "r",
        "tokens": [1, 2, 3],
        "pages": [wire.PageRun(0, 1)],
        "first_page": 0,
        "immediate": IMMEDIATE,
        "context_slot": -1,
        "deadline_s": 30.0,
        "priority": 0,
    }
    return wire.Dispatch(**(values | changes))  # type: ignore[arg-type]


def test_a_text_of_the_peer_comes_back_clipped() -> None:
    node = Node()
    end, outbox = node.peer("a")
    node.push.session_frame(end, dispatch("a:1", verify="x" * 100_000))
    failed, drained = outbox.take()
    assert isinstance(failed, wire.Failed)
    assert (failed.text[:12], len(failed.text)) == ("verify: 'xxx", wire.MAX_TEXT)
    assert drained == wire.Drained("a:1", 0.0, 0.0)


def test_replays_of_a_request_are_bounded() -> None:
    node = Node()
    end, outbox = node.peer("a")
    node.push.session_frame(end, dispatch("a:1"))
    node.schedule.plan(1, 3, base=0)
    outbox.take()
    for number in range(1, MAX_REPLAYS + 1):
        node.push.session_frame(end, wire.Regrant("a:1", IMMEDIATE))
        node.push.fabric_event(FabricEvent("drained", transfer=number))
        assert outbox.take() == []
        assert ("open_transfer", number + 1, 1, IMMEDIATE) in node.fabric.take()
    node.push.session_frame(end, wire.Regrant("a:1", IMMEDIATE))
    (failed,) = outbox.take()
    assert failed.text == f"regrant: {MAX_REPLAYS} replays, at most so many are made"
    node.schedule.compute(1)
    node.push.fabric_event(FabricEvent("drained", transfer=MAX_REPLAYS + 1))
    assert outbox.take() == [wire.Drained("a:1", 0.0, 0.0)]
    assert node.push.open_pushes == 0


def test_a_fence_of_a_connection_that_never_was_is_not_remembered() -> None:
    node = Node()
    end, _ = node.peer("a")
    node.push.session_frame(end, dispatch("a:1"))
    node.schedule.plan(1, 3, base=0)
    (work,) = node.push.open()
    attempt = work.push.attempt
    assert attempt is not None
    node.push.session_frame(end, wire.NicFenced((7, 7)))
    assert attempt.fenced == set()
    node.push.session_frame(end, wire.NicFenced((10, 20)))
    node.push.session_frame(end, wire.NicFenced((10, 20)))
    assert attempt.fenced == {(10, 20)}


@pytest.mark.parametrize(("most", "alone", "flood", "second"), [(8, 8, 4, 2), (256, 256, 128, 64)])
def test_a_flood_leaves_places(most: int, alone: int, flood: int, second: int) -> None:
    node = Node(max_waiting=most)
    end, outbox = node.peer("flood")
    assert node.flood(end, outbox, 2 * most) == alone
    node = Node(max_waiting=most)
    (end, outbox), (other, answers) = node.peer("flood"), node.peer("other")
    assert node.flood(end, outbox, 2 * most) == flood
    assert node.flood(other, answers, 2 * most) == second
    node.push.session_lost(other)
    assert node.flood(end, outbox, 2 * most) == most - flood


def test_places_name_what_is_missing() -> None:
    places = Places()
    ends = [
        session(n, peer=Role.DECODE, peer_geometry=THERE, pairs=(), node=f"d{n}")[0] for n in (1, 2)
    ]
    for end in ends:
        places.session_up(end)
    first = NodeId("d1")
    assert places.objection(ends[0], [first], most=3) is None
    assert places.objection(ends[0], [first] * 2, most=3) == (
        "2 requests of d1 here, and 1 of 3 places left"
    )
    assert places.objection(ends[1], [first] * 2, most=3) is None
    assert places.objection(ends[1], [first] * 3, most=3) == "3 requests here, at most 3"


def test_names_of_peers_are_bounded() -> None:
    figures = PushFigures()
    for number in range(2 * MAX_NAMED_PEERS):
        figures.add_bytes(f"d{number}", 1)
        figures.add_bytes("d0", 1)
    assert len(figures.bytes) == MAX_NAMED_PEERS + 1
    assert figures.bytes["d0"] == 2 * MAX_NAMED_PEERS + 1
    assert figures.bytes[OTHER_PEERS] == MAX_NAMED_PEERS
