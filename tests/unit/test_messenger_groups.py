"""Nodes of several TP groups: which group takes a request, and whose memory the writes name."""

import asyncio

import msgspec
import pytest

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.hello import Agreement, agree, wire_geometry
from pdnode.core.nics import regions_objection
from pdnode.core.pages import PagePool
from pdnode.core.slots import Slot, SlotPool
from pdnode.messenger.dispatch import DispatchLimits
from pdnode.messenger.gate import PageGate
from pdnode.messenger.groups import SourceGroup, SourceRegion
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.obs.records import Records
from pdnode.types import BootId, Role
from tests.support.link_nodes import hello
from tests.support.messenger_parts import (
    LAYERS,
    Clock,
    RecordingFabric,
    RecordingSchedule,
    geometry,
    session,
)

HERE = geometry(pages=4, tp=2)  # two groups of these on each node
RANK, REGION, COUNTER = 8, 4, 1  # where Fabric.submit has them in what it was called with


def dispatch(number: int, *, group: int = 0, tokens: int = 6) -> wire.Dispatch:
    pages = [wire.PageRun(0, -(-tokens // 4))]
    return wire.Dispatch(
        f"d:{number}", "r", [1] * tokens, pages, 0, Slot(1, 0).immediate, -1, 30.0, 0, group=group
    )


class Prefill:
    """A prefill node of two groups with a peer of `groups`."""

    def __init__(self, *, groups: int = 2) -> None:
        self.fabric = RecordingFabric()
        self.schedules = [RecordingSchedule(), RecordingSchedule()]
        self.pools = [PagePool(HERE.pages), PagePool(HERE.pages)]
        self.end, self.outbox = session(
            7, peer=Role.DECODE, peer_geometry=HERE, pairs=((0, 0),), boot="d"
        )
        self.end.groups = groups
        self.push = PushMessenger(
            geometry=HERE,
            limits=DispatchLimits(vocabulary=100, context_tokens=16, max_waiting=8),
            fabric=self.fabric,  # type: ignore[arg-type]
            groups=[
                SourceGroup(
                    PageGate(pool, max_quarantined=4),
                    schedule,
                    (SourceRegion(10 * number, number), SourceRegion(10 * number + 1, number)),
                )
                for number, (pool, schedule) in enumerate(
                    zip(self.pools, self.schedules, strict=True)
                )
            ],
            peer=PeerConfig(),
            drop_link=lambda end, text: None,
            records=Records(),
            clock=Clock(),
        )

    def hear(self, frame: wire.Frame) -> list[wire.Frame]:
        self.push.session_frame(self.end, frame)
        return self.outbox.take()

    def programs(self) -> list[tuple[int, int, int]]:
        """(region, counter, rank of the peer) of every program since the last call."""
        calls = [call[1:] for call in self.fabric.take() if call[0] == "submit"]
        return [(call[REGION], call[COUNTER], call[RANK]) for call in calls]


def test_a_prompt_goes_to_the_group_with_less_to_do_and_stays_there() -> None:
    node = Prefill()
    node.hear(dispatch(1, tokens=14))  # all four pages of group 0
    node.hear(dispatch(2))
    assert [len(one.begun) for one in node.schedules] == [1, 1]
    assert [pool.counts.used for pool in node.pools] == [4, 2]
    node.hear(dispatch(3, tokens=9))  # needs 3 pages: the first to have them is not the emptiest
    assert [len(one.begun) for one in node.schedules] == [1, 1], "it waits for pages of group 1"
    assert node.push.waiting_tokens() == 9
    node.schedules[1].plan(1, 6, base=0)
    assert node.programs() == [(10, 1, 0), (11, 1, 1)]
    node.schedules[0].plan(1, 14, base=40)
    assert node.programs() == [(0, 0, 0), (1, 0, 1)]


def test_writes_go_to_the_ranks_of_the_group_that_asked() -> None:
    node = Prefill()
    node.hear(dispatch(1, group=1))
    node.schedules[0].plan(1, 6, base=0)
    assert node.programs() == [(0, 0, 2), (1, 0, 3)]


def test_a_group_that_the_peer_does_not_have_is_refused() -> None:
    node = Prefill(groups=1)
    refused = wire.Failed("d:1", "rejected", "group: 1, this peer has 0 to 0", [])
    assert node.hear(dispatch(1, group=1))[0] == refused
    assert all(pool.counts.free == HERE.pages for pool in node.pools)


async def test_pages_of_a_group_are_counted_and_given_back_there() -> None:
    pools = [PagePool(HERE.pages), PagePool(HERE.pages)]
    fabric, slots = RecordingFabric(), SlotPool(2)
    end, outbox = session(7, peer=Role.PREFILL, peer_geometry=geometry(pages=8), pairs=((0, 0),))
    pulls = PullMessenger(
        boot=BootId("d"),
        geometry=HERE,
        fabric=fabric,  # type: ignore[arg-type]
        gates=[PageGate(pool, max_quarantined=4) for pool in pools],
        slots=slots,
        peer=PeerConfig(),
        drop_link=lambda session, text: None,
        clock=Clock(),
    )
    slot = slots.take()
    assert slot is not None
    pages = pools[1].reserve(2)
    pull = pulls.begin(
        end, request_id="r", prompt=(1,) * 6, pages=pages, slot=slot, priority=0, group=1
    )
    (sent,) = outbox.take()
    assert isinstance(sent, wire.Dispatch)
    assert (sent.group, sent.pages) == (1, [wire.PageRun(0, 2)])
    # One rank there feeds the two ranks of the group here; the other group gets nothing.
    assert ("arm", slot.slot, slot.generation, 7, 2 * LAYERS * 2) in fabric.calls
    pulls.abandon(pull)
    assert [pool.counts.quarantined for pool in pools] == [0, 2]
    pulls.session_frame(end, wire.Drained(pull.grant.key, 0.0, 0.0))
    assert [pool.counts.free for pool in pools] == [4, 4]
    await asyncio.sleep(0)


def test_hello_tells_the_number_of_groups_and_bounds_it() -> None:
    here = hello(Role.DECODE)
    three = msgspec.structs.replace(here.geometry, dp=3)
    there = hello(Role.PREFILL, geometry=three)
    agreement = agree(here, there)
    assert isinstance(agreement, Agreement)
    assert agreement.groups == 3
    for dp, tp in ((0, 1), (-1, 1), (1025, 1), (513, 2)):
        odd = msgspec.structs.replace(here.geometry, dp=dp, tp=tp)
        reasons = agree(here, msgspec.structs.replace(there, geometry=odd))
        text = f"dp: 1 here, {dp} there, must be at least 1, with at most 1024 ranks"
        assert reasons == [text]


def test_a_peer_that_knows_of_no_groups_has_one() -> None:
    full = list(msgspec.to_builtins(wire_geometry(HERE, 4)))
    assert msgspec.convert(full[:-1], wire.Geometry).dp == 1
    frame = list(msgspec.to_builtins(dispatch(1, group=3)))
    assert msgspec.convert(frame[:-1], wire.Dispatch).group == 0


@pytest.mark.parametrize("groups", [1, 3])
def test_every_rank_of_every_group_must_be_described(groups: int) -> None:
    size = HERE.region_bytes
    scratch = wire.RegionDescriptor(-1, [wire.RegionPiece(0, 0, 4096, 0, 1)])
    ranks = [
        wire.RegionDescriptor(rank, [wire.RegionPiece(0, 0, size, 0, 1)])
        for rank in range(HERE.tp * groups)
    ]
    assert regions_objection([scratch, *ranks], {0}, HERE, groups) is None
    wanted = [-1, *range(2 * groups)]
    found = regions_objection([scratch, *ranks[:-1]], {0}, HERE, groups)
    assert found == f"regions of ranks {wanted[:-1]}, expected {wanted}"
