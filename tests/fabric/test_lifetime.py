"""Threads, descriptors, signals and idling of a process that has the fabric open."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from pdnode.fabric._native import Event
from pdnode.fabric.engine import FabricEngine
from tests.fabric.fabric_node import PROVIDERS, Node, connect_process, immediate, join


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def cpu_s() -> float:
    return time.process_time()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_close_leaves_no_thread_and_no_descriptor(provider: str) -> None:
    warm = Node(provider)  # what libfabric opens once and keeps
    warm.close()
    before = threads(), descriptors()
    for _ in range(5):
        sender, target = Node(provider), Node(provider)
        assert threads() == before[0] + 2
        join(sender, target)
        sender.fabric.open_transfer(1, 1, immediate(1, 0))
        for _ in range(20):  # closed with writes under way
            sender.submit(1, [(page, page, 1) for page in range(64)], whole_page=False)
        sender.close()
        target.close()
        target.fabric.close()
    del sender, target
    assert (threads(), descriptors()) == before


def test_idle_sessions_and_a_frozen_peer_cost_no_core() -> None:
    sender, target = Node(pages=256, page_bytes=16384), Node()
    join(sender, target)
    time.sleep(0.1)
    started, used = time.monotonic(), cpu_s()
    time.sleep(3)
    share = (cpu_s() - used) / (time.monotonic() - started)
    assert share < 0.01, f"{share:.2%} of a core for two idle fabrics"
    sender.close()
    target.close()


def test_outstanding_writes_to_a_frozen_peer_do_not_spin() -> None:
    sender = Node(pages=256, page_bytes=65536)
    command = [sys.executable, "-m", "tests.fabric.target_process", "tcp", "256", "65536"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        connect_process(sender, peer, 1, b"0123456789abcdef")
        peer.send_signal(signal.SIGSTOP)
        sender.fabric.open_transfer(1, 1, immediate(5, 0))
        for _ in range(10):
            sender.submit(1, [(0, 0, 256)])
        time.sleep(0.3)
        assert sender.fabric.statistics()["writes"] > 0
        started, used = time.monotonic(), cpu_s()
        time.sleep(2)
        share = (cpu_s() - used) / (time.monotonic() - started)
        assert share < 0.02, f"{share:.2%} of a core while a peer is frozen"
        peer.send_signal(signal.SIGCONT)
        sender.fabric.finish(1)
        sender.wait("drained", transfer=1)
        peer.communicate("", timeout=10)
    sender.close()


SIGNALS = """
import os, signal, sys
said = []
signal.signal(signal.SIGTERM, lambda number, frame: said.append(number))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts without
from tests.fabric.fabric_node import Node
node = Node(sys.argv[1])
node.open(1)
os.kill(os.getpid(), signal.SIGTERM)
assert said == [signal.SIGTERM], said
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
node.close()
os.kill(os.getpid(), signal.SIGTERM)
assert len(said) == 2
"""


@pytest.mark.parametrize("provider", PROVIDERS)
def test_our_signal_handlers_stay_ours(provider: str) -> None:
    subprocess.run([sys.executable, "-c", SIGNALS, provider], check=True, timeout=30)


def test_importing_the_package_loads_nothing_native() -> None:
    code = (
        "import sys, pdnode.fabric, pdnode.fabric.library as l; l.find_library('auto', 'tcp');"
        "assert 'pdnode.fabric._native' not in sys.modules;"
        "assert 'libfabric' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


async def test_events_reach_the_handlers_on_the_loop() -> None:
    sender, target = Node(), Node()
    join(sender, target)
    engine = FabricEngine(target.fabric)
    reached: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

    def broken(event: Event) -> None:
        raise RuntimeError(event.kind)

    def handle(event: Event) -> None:
        assert threading.current_thread() is threading.main_thread()
        reached.set_result(event)

    with pytest.raises(ValueError, match="event kind 'arrived' is not one of opened, "):
        engine.on(["arrived"], handle)
    engine.on(["reached", "overshoot"], broken)
    engine.on(["reached"], handle)
    engine.start(asyncio.get_running_loop())
    target.fabric.arm(1, 0, 1, 64)
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    sender.submit(1, [(0, 0, 64)])
    event = await asyncio.wait_for(reached, 10)
    assert (event.slot, event.count) == (1, 64)
    assert len(problems) == 1
    engine.close()
    engine.close()
    sender.close()


def test_the_calls_of_the_loop_are_short() -> None:
    """No call waits for the network: the median of each stays under 50 µs, cold caches aside."""
    sender, target = Node(), Node()
    join(sender, target)
    spans = [(page, page, 1) for page in range(64)]
    took: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., object], *arguments: object) -> None:
        start = time.perf_counter()
        call(*arguments)
        took.setdefault(name, []).append(time.perf_counter() - start)

    for number in range(1, 60):
        timed("arm", target.fabric.arm, number, 0, 1, 64)
        timed("open_transfer", sender.fabric.open_transfer, number, 1, immediate(number, 0))
        timed("submit", sender.submit, number, spans)
        timed("finish", sender.fabric.finish, number)
        timed("statistics", sender.fabric.statistics)
        sender.wait("drained", transfer=number)
        timed("close_transfer", sender.fabric.close_transfer, number)
        timed("disarm", target.fabric.disarm, number)
        timed("fence", target.fabric.fence, 1000 + number)
    slow = {name: sorted(times)[len(times) // 2] for name, times in took.items()}
    assert all(median < 50e-6 for median in slow.values()), slow
    sender.close()
    target.close()
