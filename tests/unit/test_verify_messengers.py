"""Order of digests, counts and `drained` in both messengers. The digest jobs run when a test says.

What a digest is made of is tests/unit/test_digests.py and tests/fabric/test_digest.py.
"""

from typing import Any, cast

import pytest

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.pages import PagePool
from pdnode.core.slots import Slot, SlotPool
from pdnode.core.transfer import FailCause
from pdnode.messenger.digests import PageVerifier
from pdnode.messenger.dispatch import DispatchLimits
from pdnode.messenger.gate import PageGate
from pdnode.messenger.groups import SourceGroup, SourceRegion
from pdnode.messenger.pull import Outcome, Pull, PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.obs.records import Records
from pdnode.types import BootId, Role, Verify
from tests.support.messenger_parts import (
    Clock,
    FabricEvent,
    HeldDigester,
    RecordingFabric,
    RecordingSchedule,
    geometry,
    session,
)

HERE = geometry(pages=16)
KEY = "dboot:1"
SLOT = Slot(1, 0)


class Decode:
    """A decode node that grants pages 0 to 3 for a prompt of 10 tokens: 2 full pages and a part."""

    def __init__(self, verify: Verify) -> None:
        self.digester, self.pool, self.slots = HeldDigester(HERE), PagePool(HERE.pages), SlotPool(3)
        self.clock = Clock()
        self.verifier = PageVerifier(self.digester, [[2]])
        self.end, self.outbox = session(
            7, peer=Role.PREFILL, peer_geometry=geometry(pages=8), pairs=((10, 20),)
        )
        self.pulls = PullMessenger(
            boot=BootId("dboot"),
            geometry=HERE,
            fabric=cast(Any, RecordingFabric()),
            gates=[PageGate(self.pool, max_quarantined=16)],
            slots=self.slots,
            peer=PeerConfig(verify=verify),
            drop_link=lambda end, text: None,
            clock=self.clock,
            verifier=self.verifier,
        )
        slot = self.slots.take()
        assert slot is not None
        self.pull: Pull = self.pulls.begin(
            self.end,
            request_id="r",
            prompt=tuple(range(10)),
            pages=self.pool.reserve(4),
            slot=slot,
            priority=0,
        )

    def hear(self, frame: wire.Frame) -> None:
        self.pulls.session_frame(self.end, frame)

    def sent(self, first: int, count: int) -> None:
        said = HeldDigester(HERE).digest(0, 0, 0, range(first, first + count))
        self.hear(wire.Sent(KEY, first, said))

    def reach(self) -> None:
        self.pulls.fabric_event(
            cast(Any, FabricEvent("reached", slot=SLOT.slot, generation=SLOT.generation))
        )

    @property
    def idle(self) -> bool:
        return (self.pool.counts.free, self.slots.taken) == (HERE.pages, 0)


async def test_pages_are_read_once_all_landed_all_is_said_and_it_agrees() -> None:
    node = Decode(Verify.ONCE)
    [dispatch] = node.outbox.take()
    assert isinstance(dispatch, wire.Dispatch)
    assert dispatch.verify == "once"
    node.sent(0, 2)
    node.reach()
    assert not node.digester.jobs
    node.sent(2, 1)
    node.hear(wire.Drained(KEY, 0.0, 0.0))
    assert not node.pull.outcome.done()
    node.digester.go()
    assert await node.pull.outcome == Outcome(complete=True)
    node.pulls.end(node.pull)
    assert node.idle, "once"
    assert node.verifier.figures.pages == {"completion": 3}


async def test_a_page_that_differs_gives_the_attempt_up_and_keeps_its_pages() -> None:
    node = Decode(Verify.ONCE)
    node.digester.marks[1] = 1
    node.sent(0, 3)
    node.reach()
    node.outbox.take()
    node.digester.go()
    outcome = await node.pull.outcome
    assert outcome.cause is FailCause.CORRUPT
    assert outcome.text.startswith("page 1 (number 1 of the prompt), layer 0, rank 0: ")
    assert node.outbox.take() == [wire.Cancel(KEY)]
    assert node.pool.counts.quarantined == 4
    node.hear(wire.Drained(KEY, 0.0, 0.0))
    assert node.idle
    assert node.verifier.figures.mismatches == {"completion": 1}
    assert [found.code for found in node.verifier.conditions()] == ["E130"]


async def test_twice_looks_again_at_full_pages_before_they_are_free() -> None:
    node = Decode(Verify.TWICE)
    node.sent(0, 3)
    node.reach()
    node.digester.go()
    assert (await node.pull.outcome).complete
    node.hear(wire.Drained(KEY, 0.0, 0.0))
    node.digester.marks[2] = 1  # the last page, where this node goes on
    node.pulls.end(node.pull)
    node.pulls.end(node.pull)
    assert node.pool.counts.used == 4
    assert len(node.digester.jobs) == 1
    node.digester.go()
    assert node.idle
    assert node.verifier.figures.pages == {"completion": 3, "release": 2}
    assert node.verifier.figures.mismatches == {"completion": 0, "release": 0}


async def test_twice_finds_what_changed_in_between() -> None:
    node = Decode(Verify.TWICE)
    node.sent(0, 3)
    node.reach()
    node.digester.go()
    node.digester.marks[1] = 1
    node.pulls.abandon(node.pull)
    node.digester.go()
    assert node.verifier.figures.mismatches == {"completion": 0, "release": 1}
    node.hear(wire.Drained(KEY, 0.0, 0.0))
    assert node.idle


@pytest.mark.parametrize("how", ["cancelled", "lost"])
async def test_what_was_given_up_meanwhile_counts_for_nothing(how: str) -> None:
    node = Decode(Verify.ONCE)
    node.digester.marks[1] = 1
    node.sent(0, 3)
    node.reach()
    if how == "cancelled":
        node.pulls.abandon(node.pull)
        node.hear(wire.Drained(KEY, 0.0, 0.0))
    else:
        node.pulls.session_lost(node.end, "x")
        node.pulls.session_fenced(node.end)
    assert node.idle
    node.digester.go()
    assert (node.idle, node.verifier.figures.mismatches) == (True, {})


async def test_digests_that_do_not_fit_the_request_end_it() -> None:
    node = Decode(Verify.ONCE)
    node.sent(1, 1)
    assert (await node.pull.outcome).cause is FailCause.REJECTED


class Prefill:
    """A prefill node with a dispatch of 6 tokens in two chunks, and its digests asked for."""

    def __init__(self) -> None:
        self.digester, self.pool = HeldDigester(HERE), PagePool(8)
        self.schedule = RecordingSchedule()
        self.end, self.outbox = session(
            7, peer=Role.DECODE, peer_geometry=HERE, pairs=((20, 10),), boot="dboot"
        )
        group = SourceGroup(PageGate(self.pool, 8), cast(Any, self.schedule), (SourceRegion(2, 4),))
        self.push = PushMessenger(
            geometry=geometry(pages=8),
            limits=DispatchLimits(100, 40, 4, verify=True),
            fabric=cast(Any, RecordingFabric()),
            groups=[group],
            peer=PeerConfig(),
            drop_link=lambda end, text: None,
            records=Records(),
            clock=Clock(),
            digester=self.digester,
        )
        pages = [wire.PageRun(3, 2)]
        self.push.session_frame(
            self.end,
            wire.Dispatch(KEY, "r", [1] * 6, pages, 0, SLOT.immediate, -1, 30.0, 0, verify="twice"),
        )
        for end in (4, 6):
            self.schedule.plan(1, end, base=0)
            self.schedule.compute(1)
        self.outbox.take()

    def drained(self) -> None:
        self.push.fabric_event(cast(Any, FabricEvent("drained", transfer=1)))

    def kinds(self) -> list[str]:
        return [wire.tag(frame) for frame in self.outbox.take()]


def test_drained_and_the_source_pages_wait_for_the_digests() -> None:
    node = Prefill()
    node.drained()
    node.digester.go()
    [sent] = node.outbox.take()
    assert sent == wire.Sent(KEY, 0, HeldDigester(HERE).digest(0, 0, 0, [0]))
    assert node.pool.counts.used == 2
    node.digester.go()
    assert node.kinds() == ["sent", "drained"]
    assert (node.pool.counts.free, node.push.open_pushes) == (8, 0)


def test_digests_that_are_sent_first_hold_nothing_up() -> None:
    node = Prefill()
    node.digester.go()
    node.digester.go()
    assert node.kinds() == ["sent", "sent"]
    node.drained()
    assert node.kinds() == ["drained"]


@pytest.mark.parametrize("drained_first", [True, False])
def test_a_cancel_does_not_wait_for_digests(drained_first: bool) -> None:
    node = Prefill()
    if drained_first:
        node.drained()
    node.push.session_frame(node.end, wire.Cancel(KEY))
    if not drained_first:
        node.drained()
    assert node.kinds() == ["drained"]
    assert node.pool.counts.free == 8
    node.digester.go()
    assert node.kinds() == [], "nobody asks any more"


def test_a_lost_link_does_not_wait_for_digests() -> None:
    node = Prefill()
    node.drained()
    node.push.session_lost(node.end)
    assert node.pool.counts.free == 8
    node.digester.go()
    assert node.push.open_pushes == 0
