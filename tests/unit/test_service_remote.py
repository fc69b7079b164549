"""Requests of a decode node whose prefill node fails them, at moments that are hard to hit."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.pages import PagePool
from pdnode.core.request import Request
from pdnode.core.schedule import Scheduler
from pdnode.core.slots import SlotPool
from pdnode.daemon.engine import Group
from pdnode.daemon.flight import Flight
from pdnode.daemon.service import NodeService
from pdnode.daemon.steps import StepLoop
from pdnode.errors import BadRequest, Cause, PrefillLost
from pdnode.messenger.digests import PageVerifier
from pdnode.messenger.gate import PageGate
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.session import PeerSession
from pdnode.obs.records import Records
from pdnode.types import BootId, Role, Verify, WhenNoPrefill
from tests.support.messenger_parts import (
    PAGE_TOKENS,
    Clock,
    FabricEvent,
    HeldDigester,
    RecordingFabric,
    geometry,
    session,
)

HERE = geometry(pages=6)
PROMPT = 10  # tokens: two full pages and a part are sent


@dataclass
class Hello:
    """Of the prefill node, as far as the service looks at it."""

    context_tokens: int = 1000


class Decode:
    """A decode node of 6 pages with one prefill peer, whose worker never runs."""

    def __init__(self, policy: WhenNoPrefill, verify: Verify = Verify.OFF) -> None:
        self.clock, self.pool = Clock(), PagePool(HERE.pages)
        self.digester = HeldDigester(HERE)
        self.verifier = PageVerifier(self.digester, [[2]])
        gate = PageGate(self.pool, max_quarantined=HERE.pages)
        scheduler = Scheduler(page_tokens=PAGE_TOKENS, chunk_tokens=16, max_running=4)
        self.steps = StepLoop(scheduler, cast(Any, None))
        self.peer, self.outbox = session(
            7, peer=Role.PREFILL, peer_geometry=geometry(pages=8), pairs=((10, 20),)
        )
        self.peer.hello = cast(Any, Hello())
        self.pulls = PullMessenger(
            boot=BootId("dboot"),
            geometry=HERE,
            fabric=cast(Any, RecordingFabric()),
            gates=[gate],
            slots=SlotPool(8),
            peer=PeerConfig(verify=verify),
            drop_link=lambda end, text: None,
            clock=self.clock,
            verifier=self.verifier,
        )
        self.service = NodeService(
            role=Role.DECODE,
            policy=policy,
            model_name="m",
            context_tokens=1000,
            vocabulary=100,
            max_waiting=16,
            records=Records(),
            clock=self.clock,
        )
        self.service.start(
            groups=[Group(cast(Any, None), gate, self.steps)],
            peers=cast(Any, self),
            pulls=self.pulls,
        )

    def usable_prefills(self) -> list[PeerSession]:
        return [self.peer] if self.peer.up else []

    async def submit(self, name: str, answer: int = 2) -> Flight:
        request = Request(name, (1,) * PROMPT, answer, 0, frozenset(), 0.0, 0, 1.0, 0)
        flight = await self.service.submit(request)
        await turn()
        return flight

    def reach(self, slot: int) -> None:
        self.pulls.fabric_event(cast(Any, FabricEvent("reached", slot=slot)))

    def overshoot(self, slot: int) -> None:
        self.pulls.fabric_event(cast(Any, FabricEvent("overshoot", slot=slot)))

    def hear(self, frame: wire.Frame) -> None:
        self.pulls.session_frame(self.peer, frame)

    def lose(self) -> None:
        self.peer.up = False
        self.pulls.session_lost(self.peer, "gone")
        self.pulls.session_fenced(self.peer)


async def turn() -> None:
    """What is ready runs, and what that makes ready."""
    for _ in range(5):
        await asyncio.sleep(0)


async def end_of(flight: Flight) -> Cause:
    with pytest.raises(Cause) as found:
        _ = [event async for event in flight.events()]
    return found.value


async def test_pages_found_wrong_before_the_request_had_its_turn_are_never_read() -> None:
    """With `twice` they are held for a last look: held is not the same as good."""
    node = Decode(WhenNoPrefill.REFUSE, Verify.TWICE)
    flight = await node.submit("a")
    said = HeldDigester(HERE).digest(0, 0, 0, range(3))
    node.hear(wire.Sent("dboot:1", 0, said))
    node.reach(1)
    node.digester.go()
    node.overshoot(1)
    await turn()
    assert not node.steps.has_work
    node.lose()
    assert isinstance(await end_of(flight), Cause)
    while node.digester.jobs:
        node.digester.go()
    await turn()
    assert node.pool.counts.free == HERE.pages


async def test_who_has_no_other_way_does_not_wait_for_pages_to_hear_it() -> None:
    node = Decode(WhenNoPrefill.REFUSE)
    running = await node.submit("running")
    node.reach(1)
    await turn()
    lost = await node.submit("lost")
    ahead = await node.submit("ahead", answer=12)
    assert node.pool.counts.free == 0
    node.lose()
    await turn()
    found = await end_of(lost)
    assert isinstance(found, PrefillLost)
    assert str(found) == "prefill peer: gone"
    assert ahead.finish is None
    running.cancel("cancelled")
    await turn()
    assert (await end_of(ahead)).status == 503
    assert node.pool.counts.free == HERE.pages


async def test_what_no_prefill_node_can_ever_take_is_said_and_not_retried() -> None:
    node = Decode(WhenNoPrefill.REFUSE)
    cast(Any, node.peer.hello).context_tokens = PROMPT - 2
    with pytest.raises(BadRequest, match="prompt: 10 tokens, the prefill nodes take 9"):
        await node.submit("a")
    assert (node.service.open_requests, node.pool.counts.free) == (0, HERE.pages)


@pytest.mark.parametrize("limit", ["most_tokens", "MAX_RUNS"])
async def test_a_prompt_that_no_frame_has_room_for_is_run_here(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dispatch would end the link, and with it the requests of all others."""
    small = {"most_tokens": lambda vocabulary: PROMPT - 2, "MAX_RUNS": 1}
    monkeypatch.setattr(wire, limit, small[limit])
    node = Decode(WhenNoPrefill.LOCAL)
    if limit == "MAX_RUNS":  # every second page is free
        held = [node.pool.reserve(1) for _ in range(HERE.pages)]
        for one in held[::2]:
            node.pool.release(one)
    flight = await node.submit("a")
    assert flight.prefill == "local"
    assert not node.outbox.take()
    flight.cancel("cancelled")
    assert node.pool.counts.used == 0


@pytest.mark.parametrize("where", ["place", "end"])
async def test_a_broken_assertion_reaches_the_node_and_the_client(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages may be held for ever or given away too early: whoever called, the node must end."""
    node = Decode(WhenNoPrefill.LOCAL)
    node.peer.up = False
    faults: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(str(context["exception"])))

    def broken(self: PagePool, runs: object) -> None:
        raise AssertionError("pages of Run(0, 3) are free")

    if where == "place":
        monkeypatch.setattr(PagePool, "activate", broken)
        flight = await node.submit("a")
        assert (await end_of(flight)).status == 500
    else:
        flight = await node.submit("a")
        monkeypatch.setattr(PagePool, "release", broken)
        flight.cancel("cancelled")
        assert [event async for event in flight.events()] == []
    assert faults == ["pages of Run(0, 3) are free"]
    assert node.service.open_requests == 0
