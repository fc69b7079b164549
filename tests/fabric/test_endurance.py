"""The core over many pages and sessions: memory, descriptors and registrations come back.

`PDNODE_SOAK=full` (`make soak-fabric`) runs the long form; else a tenth or less of it.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fabric.fabric_node import WAIT_S, Node, immediate, join

FULL = os.environ.get("PDNODE_SOAK") == "full"
MOST_GROWTH_BYTES = 2 << 20
"""A leak of 3 bytes a page, or of 250 bytes a session, would show in the long form. The heap's own
trimming moves less than this."""
PAGES, SESSIONS, SETTLING = (1_000_000, 10_000, 1_000) if FULL else (100_000, 600, 200)
TRANSFER_PAGES = 1_000

pytestmark = pytest.mark.timeout(3600 if FULL else 120)


def used() -> tuple[int, int]:
    """(resident bytes, descriptors) of this process."""
    return psutil.Process().memory_info().rss, len(list(Path("/proc/self/fd").iterdir()))


def test_pages_cost_no_memory() -> None:
    sender, target = Node(pages=TRANSFER_PAGES), Node(pages=TRANSFER_PAGES)
    sender.fill(1)
    join(sender, target)
    chance = random.Random(4)
    spans = [(page, page, 1) for page in range(TRANSFER_PAGES)]
    resident, descriptors = 0, 0
    transfers = PAGES // TRANSFER_PAGES
    for number in range(transfers + transfers // 10):
        if number == transfers // 10:  # pools and the heap have their size
            resident, descriptors = used()
        transfer, slot = number + 1, 1 + number % 4095
        chance.shuffle(spans)
        target.fabric.arm(slot, number // 4095, 1, TRANSFER_PAGES)
        sender.fabric.open_transfer(transfer, 1, immediate(slot, number // 4095))
        sender.submit(transfer, spans)
        sender.fabric.finish(transfer)
        assert target.wait("reached", slot=slot, timeout_s=WAIT_S).count == TRANSFER_PAGES
        sender.wait("drained", transfer=transfer)
        assert sum(row[5] for row in sender.fabric.close_transfer(transfer)) == sender.size
        target.fabric.disarm(slot)
    after, open_now = used()
    assert target.memory[:] == sender.memory[:]
    assert sender.fabric.statistics()["posted_pages"] == (transfers + transfers // 10) * 1_000
    assert open_now == descriptors
    assert after - resident < MOST_GROWTH_BYTES
    sender.close()
    target.close()


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    both = Node(pages=16), Node(pages=16)
    yield both
    for node in both:
        node.close()


def test_sessions_leave_nothing_behind(nodes: tuple[Node, Node]) -> None:
    """Every tenth is fenced in the middle of its set-up, one side or the other first."""
    sender, target = nodes
    sender.fill(2)
    chance = random.Random(5)
    at_start: list[tuple[int, int]] = []
    for session in range(1, SESSIONS + SETTLING + 1):
        if session == SETTLING + 1:
            at_start = settled(nodes)
        if session % 10 == 0:
            begin(sender, target, session)
        else:
            join(sender, target, session, token_of(session))
            push_one(sender, target, session)
        for node in chance.sample(nodes, 2):
            node.fabric.fence(session)
            node.wait("fenced", session=session)
        for node in nodes:
            node.gather()
            node.events.clear()
    (resident, descriptors), *counts = at_start
    (after, open_now), *counts_now = settled(nodes)
    assert counts_now == counts == [(0, 0)] * 2
    assert open_now <= descriptors  # at the start a socket may have been closing still
    assert after - resident < MOST_GROWTH_BYTES


def token_of(session: int) -> bytes:
    """Each its own: a request of the session before may still be on the way."""
    return f"{session:016d}".encode()


def begin(sender: Node, target: Node, session: int) -> None:
    """A session whose connection request is on its way."""
    sender.open(session, token_of(session), writable=False)
    target.open(session, token_of(session))
    target.fabric.connect(session, (0, 0), sender.address(session), 5.0)


def push_one(sender: Node, target: Node, session: int) -> None:
    slot, generation = 1 + session % 4095, session // 4095
    target.fabric.arm(slot, generation, session, sender.pages)
    sender.fabric.open_transfer(session, session, immediate(slot, generation))
    sender.submit(session, [(0, 0, sender.pages)])
    sender.fabric.finish(session)
    target.wait("reached", slot=slot)
    sender.wait("drained", transfer=session)
    sender.fabric.close_transfer(session)
    target.fabric.disarm(slot)


def settled(nodes: tuple[Node, Node]) -> list[tuple[int, int]]:
    """What is used, then connections and sessions of each node."""
    counts = []
    for node in nodes:
        found = node.fabric.statistics()
        counts.append((found["connections"], found["sessions"]))
    return [used(), *counts]
