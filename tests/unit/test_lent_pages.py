"""Pages and immediates lent for `pdnode fabric-test` come back, whatever becomes of the session."""

import asyncio
from typing import Any, cast

import pytest

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.pages import PagePool
from pdnode.core.slots import SlotPool
from pdnode.messenger.fabrictest import TestReceiver, Written
from pdnode.messenger.gate import PageGate
from pdnode.messenger.pull import PullMessenger
from pdnode.types import BootId, Role, Run
from tests.support.messenger_parts import Clock, RecordingFabric, geometry, session

HERE = geometry(pages=4)
PAIR = (10, 20)
KEY = "boot:test:1"


class Decode:
    """A decode node with one session, over one connection or two."""

    def __init__(self) -> None:
        self.pool, self.slots = PagePool(HERE.pages), SlotPool(2)
        self.gate = PageGate(self.pool, max_quarantined=HERE.pages)
        self.fabric = RecordingFabric()
        self.end, self.outbox = session(
            7, peer=Role.PREFILL, peer_geometry=HERE, pairs=(PAIR, (11, 21))
        )
        self.pulls = PullMessenger(
            boot=BootId("dboot"),
            geometry=HERE,
            fabric=cast(Any, self.fabric),
            gates=[self.gate],
            slots=self.slots,
            peer=PeerConfig(),
            drop_link=lambda end, text: None,
            clock=Clock(),
        )
        self.receiver = TestReceiver(
            fabric=cast(Any, self.fabric), gates=[self.gate], pulls=self.pulls
        )

    def write(self, timeout_s: float = 60.0) -> asyncio.Task[Written]:
        written = self.receiver.write(
            self.end, PAIR, pages=2, passes=3, length=64, serial=False, timeout_s=timeout_s
        )
        return asyncio.create_task(written)

    def lose(self) -> None:
        self.end.up = False
        self.receiver.session_lost(self.end)
        self.pulls.session_lost(self.end, "gone")
        self.pulls.session_fenced(self.end)
        self.receiver.session_fenced(self.end)

    def fenced(self) -> None:
        """What every call of `fence` is answered with."""
        for _, _, pair in [call for call in self.fabric.take() if call[0] == "fence"]:
            self.pulls.pair_fenced(self.end, pair)
            self.receiver.pair_fenced(self.end, pair)

    @property
    def idle(self) -> bool:
        return (self.pool.counts.free, self.slots.taken) == (HERE.pages, 0)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("gone", ["session", "connection"])
async def test_a_session_that_is_lost_while_the_test_waits_for_pages(gone: str) -> None:
    node = Decode()
    others: tuple[Run, ...] = node.pool.reserve(3)
    task = node.write(timeout_s=0.01)
    await turn()
    if gone == "session":
        node.lose()
    else:
        node.end.pairs = ((11, 21),)
    node.gate.release(others)
    written = await asyncio.wait_for(task, 30)
    assert (written.seconds, written.counted, written.expected) == ([], 0, 6)
    assert written.cause
    assert node.idle


async def test_who_leaves_leaves_nothing_behind() -> None:
    """A peer that never answers is no reason to keep the pages."""
    node = Decode()
    task = node.write(timeout_s=0.05)
    await turn()
    assert isinstance(node.outbox.take()[0], wire.TestWrites)
    task.cancel()
    await turn()
    assert node.pool.counts.reserved == 2, "the writes may be under way"
    async with asyncio.timeout(30):
        while not node.pool.counts.quarantined:
            await asyncio.sleep(0.01)
    node.fenced()
    assert node.idle


async def test_an_answer_after_that_is_in_time() -> None:
    node = Decode()
    task = node.write()
    await turn()
    task.cancel()
    await turn()
    node.receiver.frame(node.end, wire.TestWritten(KEY, [], "", clean=True, mtu=0))
    assert node.idle
    assert not [call for call in node.fabric.take() if call[0] == "fence"]


async def test_a_test_that_is_not_done_in_time_ends_its_connection() -> None:
    node = Decode()
    assert "not done within" in (await node.write(timeout_s=0.01)).cause
    assert node.pool.counts.quarantined == 2
    node.fenced()
    assert node.idle
    assert node.outbox.take()[1:] == [wire.NicFenced(PAIR)]


async def test_a_connection_that_is_fenced_for_another_cause_ends_the_test() -> None:
    """What the peer says of it later must not end the connection that has come back since."""
    node = Decode()
    task = node.write()
    await turn()
    node.pulls.pair_lost(node.end, PAIR, "reset")
    node.fenced()
    assert node.idle
    node.receiver.frame(node.end, wire.TestWritten(KEY, [], "lost", clean=False, mtu=0))
    assert (await asyncio.wait_for(task, 30)).cause == "the connection was lost"
    assert not [call for call in node.fabric.take() if call[0] == "fence"]
    assert node.idle
