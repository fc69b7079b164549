"""Layer programs, driven by the counter of another process."""

import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from pdnode.engine.protocol import (
    COUNTER_OFFSET,
    COUNTER_PAGE_BYTES,
    SILENT_OFFSET,
    SLEEPING_OFFSET,
)
from tests.fabric.fabric_node import PROVIDERS, Node, immediate, join

LAYERS = 6
PAGES = 16


class Worker:
    """A process that raises the layer counter of `node`."""

    def __init__(self, node: Node) -> None:
        self.number, _, fd = node.counter()
        wake = node.fabric.wake_fd(0)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fabric.counter_process", str(fd), str(wake)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(fd, wake),
        )
        os.close(fd)

    def raise_layers(self, times: int) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{times}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate(timeout=10)


@pytest.fixture(params=PROVIDERS)
def setting(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node, Worker]]:
    sender, target = (Node(request.param, pages=PAGES, layers=LAYERS) for _ in range(2))
    sender.fill(4)
    worker = Worker(sender)
    join(sender, target)
    yield sender, target, worker
    worker.close()
    sender.close()
    target.close()


def arrived(target: Node, slot: int, layers: int) -> None:
    """A slot that expects exactly this many layers is reached by exactly these."""
    assert target.wait("reached", slot=slot).count == layers * PAGES


def layers_there(sender: Node, target: Node) -> list[bool]:
    stride = sender.layer_stride
    return [
        target.memory[layer * stride : (layer + 1) * stride]
        == sender.memory[layer * stride : (layer + 1) * stride]
        for layer in range(LAYERS)
    ]


def test_every_layer_goes_when_it_is_raised(setting: tuple[Node, Node, Worker]) -> None:
    sender, target, worker = setting
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    target.fabric.arm(1, 0, 1, LAYERS * PAGES)
    sender.submit(1, [(0, 0, PAGES)], counter=worker.number)
    sender.fabric.finish(1)
    for layer in range(LAYERS):
        before = time.monotonic_ns()
        worker.raise_layers(1)
        expected = [index <= layer for index in range(LAYERS)]
        while target.fabric.statistics()["received_units"] < (layer + 1) * PAGES:
            assert time.monotonic_ns() < before + 10**10
            target.gather(0.001)
        while sender.fabric.peer_statistics()[0]["done_pages"] < (layer + 1) * PAGES:
            sender.gather(0.001)
        assert layers_there(sender, target) == expected
    target.wait("reached", slot=1)
    sender.wait("drained", transfer=1)
    record = sender.fabric.close_transfer(1)
    assert [(row[0], row[1], row[5], row[6]) for row in record] == [
        (0, layer, PAGES * 4096, 1) for layer in range(LAYERS)
    ]
    for _, _, raised, posted, done, _, _ in record:
        assert 0 < raised <= posted <= done < time.monotonic_ns()
    assert all(one[4] < two[2] for one, two in pairwise(record))


def test_raises_seen_together_and_programs_that_come_late(
    setting: tuple[Node, Node, Worker],
) -> None:
    sender, target, worker = setting
    assert worker.raise_layers(3) == 3
    # Late: layers 0 to 2 are due when it comes.
    target.fabric.arm(1, 0, 1, 3 * PAGES)
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    sender.submit(1, [(0, 0, PAGES)], counter=worker.number)
    arrived(target, 1, 3)
    assert layers_there(sender, target) == [True] * 3 + [False] * 3
    # Coalesced: the rest at once. Too far: more raises than layers.
    worker.raise_layers(5)
    sender.fabric.finish(1)
    assert target.wait("overshoot", slot=1).count > 3 * PAGES
    sender.wait("drained", transfer=1)
    assert layers_there(sender, target) == [True] * LAYERS
    # Wholly late.
    target.fabric.arm(2, 0, 1, LAYERS * PAGES)
    sender.fabric.open_transfer(2, 1, immediate(2, 0))
    sender.submit(2, [(0, 0, PAGES)], counter=worker.number, base=2)
    sender.fabric.finish(2)
    arrived(target, 2, LAYERS)
    sender.wait("drained", transfer=2)


def test_one_counter_drives_programs_of_several_passes(
    setting: tuple[Node, Node, Worker],
) -> None:
    sender, target, worker = setting
    half = PAGES // 2
    for number, base, spans in ((1, 0, [(0, 0, half)]), (2, LAYERS, [(half, half, half)])):
        target.fabric.arm(number, 0, 1, LAYERS * half)
        sender.fabric.open_transfer(number, 1, immediate(number, 0))
        sender.submit(number, spans, counter=worker.number, base=base)
        sender.fabric.finish(number)
    worker.raise_layers(LAYERS)
    target.wait("reached", slot=1)
    sender.wait("drained", transfer=1)
    target.gather(0.02)
    assert [event for event in target.events if event.slot == 2] == []
    worker.raise_layers(LAYERS)
    target.wait("reached", slot=2)
    sender.wait("drained", transfer=2)
    assert layers_there(sender, target) == [True] * LAYERS


def test_a_stopped_program_waits_for_no_layer(setting: tuple[Node, Node, Worker]) -> None:
    sender, target, worker = setting
    target.fabric.arm(1, 0, 1, 2 * PAGES)
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    sender.submit(1, [(0, 0, PAGES)], counter=worker.number)
    worker.raise_layers(2)
    arrived(target, 1, 2)
    sender.fabric.stop(1)
    sender.wait("drained", transfer=1)
    worker.raise_layers(10)
    sender.submit(1, [(0, 0, PAGES)])  # after stop: nothing is posted
    sender.gather(0.02)
    target.gather()
    assert sender.events == target.events == []
    assert target.fabric.statistics()["received_units"] == 2 * PAGES
    assert [row[6] for row in sender.fabric.close_transfer(1)] == [1, 1, 0, 0, 0, 0]


def test_a_removed_counter_fails_what_waits_for_it(setting: tuple[Node, Node, Worker]) -> None:
    sender, _, worker = setting
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    sender.submit(1, [(0, 0, PAGES)], counter=worker.number)
    sender.fabric.remove_counter(worker.number)
    assert sender.wait("failed", transfer=1).text == "the layer counter is gone"
    sender.wait("settled", transfer=1)


def test_a_silent_counter_is_looked_at_while_the_thread_sleeps() -> None:
    """A GPU stores the counter and wakes nobody. Each of many raises comes while the thread sleeps,
    which without the mark in the page would be half a second each."""
    layers = 60
    sender, target = (Node("tcp", pages=1, layers=layers) for _ in range(2))
    number, _, fd = sender.counter()
    join(sender, target)
    with mmap.mmap(fd, COUNTER_PAGE_BYTES) as page:
        struct.pack_into("<I", page, SILENT_OFFSET, 1)
        sender.fabric.open_transfer(1, 1, immediate(1, 0))
        target.fabric.arm(1, 0, 1, layers)
        sender.submit(1, [(0, 0, 1)], counter=number)
        sender.fabric.finish(1)
        end = time.monotonic() + layers * 0.5 / 2
        for raised in range(1, layers + 1):
            while not struct.unpack_from("<I", page, SLEEPING_OFFSET)[0]:
                assert time.monotonic() < end
            struct.pack_into("<Q", page, COUNTER_OFFSET, raised)
            while target.fabric.statistics()["received_units"] < raised:
                assert time.monotonic() < end, f"{raised} layers in half the time of as many sleeps"
    os.close(fd)
    assert target.wait("reached", slot=1).count == layers
    sender.close()
    target.close()
