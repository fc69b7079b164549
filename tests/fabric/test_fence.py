"""The fence: nothing of a fenced peer lands, whatever that peer is doing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fabric.fabric_node import PROVIDERS, TOKEN, Node, by_rank, immediate, join
from tests.fabric.sender_process import GENERATION, SLOT

PAGES = 256
PAGE_BYTES = 16384
PATTERN = b"\xa5" * PAGE_BYTES
OTHER_PAGES = 64
SESSION, OTHER_SESSION = 1, 2
OTHER_TOKEN = b"fedcba9876543210"


class Sender:
    """`sender_process.py`, joined to `target` as session 1."""

    def __init__(self, provider: str, target: Node, session: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fabric.sender_process", provider, str(PAGES),
             str(PAGE_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        region = target.open(session)
        self.tell(token=TOKEN.decode())
        offer = self.hear()
        target.fabric.connect(session, (0, 0), bytes.fromhex(offer["endpoint"]), 5.0)
        name = b"" if provider == "tcp" else target.address(session)
        target.fabric.set_remote(
            session, [(rank, [tuple(p) for p in pieces]) for rank, pieces in offer["scratch"]]
        )
        self.tell(remote=region, endpoint=name.hex())
        target.wait("connected", session=session)
        target.fabric.probe(session)
        target.wait("probed", session=session)
        assert self.hear() == {"up": True}
        self.tell(go=True)

    def tell(self, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate(timeout=10)


def units(node: Node) -> int:
    return node.fabric.statistics()["received_units"]


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.0005)


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Node]:
    node = Node(request.param, pages=PAGES + OTHER_PAGES, page_bytes=PAGE_BYTES)
    yield node
    node.close()


def freeze_fence_wake(target: Node, other: Node, run: int, *, fence: bool) -> int:
    """One run; returns how many of the sender's pages changed after the pattern was laid."""
    session = 10 + run
    sender = Sender(target.provider, target, session)
    try:
        target.fabric.arm(SLOT, GENERATION, session, 1 << 38)
        start = units(target)
        goal = random.Random(run).randrange(50, 3 * PAGES)
        until(lambda: units(target) > start + goal)
        sender.freeze()
        if fence:
            target.fabric.fence(session)
            target.wait("fenced", session=session, pair=(-1, -1))
        target.memory[: PAGES * PAGE_BYTES] = PATTERN * PAGES
        late = target.fabric.statistics()["late_immediates"]
        counted = units(target)
        sender.wake()
        push_from(other, target, 1 + run)  # a second peer, all the while
        if fence:
            assert sender.hear() == {"failed": True}
        else:
            until(lambda: units(target) > counted + OTHER_PAGES)
        changed = sum(target.page(page) != PATTERN for page in range(PAGES))
        if fence:
            assert units(target) == counted + OTHER_PAGES
            assert target.fabric.statistics()["late_immediates"] == late
        target.fabric.fence(session)
        target.wait("fenced", session=session, pair=(-1, -1))
        target.fabric.disarm(SLOT)
    finally:
        sender.end()
    return changed


def push_from(other: Node, target: Node, number: int) -> None:
    """All pages of `other` land in the last pages of `target`, exactly once each."""
    other.fill(number)
    target.fabric.arm(20, number & 0xFF, OTHER_SESSION, OTHER_PAGES)
    other.fabric.open_transfer(number, OTHER_SESSION, immediate(20, number & 0xFF))
    other.submit(number, [(0, PAGES, OTHER_PAGES)], remote_layer_stride=target.layer_stride)
    other.fabric.finish(number)
    assert target.wait("reached", slot=20).count == OTHER_PAGES
    other.wait("drained", transfer=number)
    other.fabric.close_transfer(number)
    target.fabric.disarm(20)
    assert target.memory[PAGES * PAGE_BYTES :] == other.memory[:]


@pytest.mark.parametrize(("target", "runs"), [("tcp", 20), ("tcp-rdm", 6)], indirect=["target"])
def test_a_frozen_sender_changes_nothing_after_the_fence(target: Node, runs: int) -> None:
    other = Node(target.provider, pages=OTHER_PAGES, page_bytes=PAGE_BYTES)
    join(other, target, OTHER_SESSION, OTHER_TOKEN)
    changed = [freeze_fence_wake(target, other, run, fence=True) for run in range(runs)]
    assert changed == [0] * runs
    # The control: without the fence the same sender goes on writing.
    assert freeze_fence_wake(target, other, runs, fence=False) > 0
    other.close()


def advance(sender: Node, target: Node, session: int, said: dict[str, object]) -> None:
    """Takes whatever step of the set-up is possible now, like two links that talk."""
    for node in (sender, target):
        node.gather()
        for event in node.events:
            if event.session == session:
                said[f"{event.kind} {node is sender}"] = event
        node.events = [event for event in node.events if event.session != session]

    def once(step: str, *needed: str) -> bool:
        if step in said or any(name not in said for name in needed):
            return False
        said[step] = True
        return True

    if once("connect", "opened True", "opened False"):
        target.fabric.connect(session, (0, 0), sender.address(session), 5.0)
    if once("remote", "connected True", "connected False"):
        sender.fabric.set_remote(session, by_rank(target.fabric.descriptors(session)))
        target.fabric.set_remote(session, by_rank(sender.fabric.descriptors(session)))
        sender.fabric.probe(session)
        target.fabric.probe(session)
    if once("write", "probed True", "probed False"):
        sender.fabric.open_transfer(session, session, immediate(3, session & 0xFF))
        sender.submit(session, [(0, 0, 16)] * 40, whole_page=False)


def test_a_fence_at_any_moment_of_the_set_up_leaves_nothing_behind() -> None:
    sender, target = Node(pages=16), Node(pages=16)
    chance = random.Random(5)
    join(sender, target, 1)
    for node in (sender, target):
        node.fabric.fence(1)
        node.wait("fenced", session=1)
        node.events.clear()
    base = len(os.listdir("/proc/self/fd"))
    steps: list[int] = []
    for session in range(2, 202):
        token = session.to_bytes(16, "little")
        sender.fabric.open_session(session, [0], [], token)
        target.fabric.open_session(session, [0], [target.region], token)
        # Set-up takes about 2 ms: half of the fences fall into it, half after.
        due = time.monotonic() + chance.choice([0.003, 0.02]) * chance.random()
        said: dict[str, object] = {}
        while time.monotonic() < due:
            advance(sender, target, session, said)
        steps.append(len(said))
        nodes = [sender, target] if chance.random() < 0.5 else [target, sender]
        for node in nodes:
            node.fabric.fence(session)
            node.wait("fenced", session=session, pair=(-1, -1))
        if "write" in said:
            assert sender.wait("settled", transfer=session)
            sender.fabric.close_transfer(session)
        for node in nodes:
            node.gather()
            node.events.clear()
    assert len(set(steps)) > 4, "the fences met several steps of the set-up"
    until(lambda: len(os.listdir("/proc/self/fd")) == base)
    statistics = [node.fabric.statistics() for node in (sender, target)]
    assert all(one["sessions"] == one["connections"] == one["writes"] == 0 for one in statistics)
    join(sender, target, 1000, b"x" * 16)  # and both still work
    sender.close()
    target.close()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_fence_is_answered(provider: str) -> None:
    sender, target = Node(provider), Node(provider)
    join(sender, target)
    target.fabric.fence(1, (0, 0))
    assert target.wait("fenced", session=1).pair == (0, 0)
    target.fabric.fence(1)
    target.fabric.fence(1)
    for _ in range(2):
        assert target.wait("fenced", session=1).pair == (-1, -1)
    target.fabric.fence(77)  # never opened: nothing of it can land
    target.wait("fenced", session=77)
    assert target.fabric.statistics()["sessions"] == 0
    sender.close()
    target.close()


def test_a_pair_comes_back_with_new_keys() -> None:
    sender, target = Node(), Node()
    join(sender, target)
    before = dict(target.fabric.descriptors(1))
    target.fabric.fence(1, (0, 0))
    target.wait("fenced", pair=(0, 0))
    sender.fabric.fence(1, (0, 0))
    sender.wait("fenced", pair=(0, 0))
    join(sender, target)
    after = dict(target.fabric.descriptors(1))
    assert after.keys() == before.keys()
    assert all(after[region][0][4] != before[region][0][4] for region in after)
    sender.fill(3)
    target.fabric.arm(1, 0, 1, 8)
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    sender.submit(1, [(0, 8, 8)])
    target.wait("reached", slot=1)
    assert target.page(15) == sender.page(7)
    sender.close()
    target.close()
