"""What the supervisor hears, datagram by datagram, and when the watchdog is not fed."""

import asyncio
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from pdnode.config import Config, ModelConfig, NodeConfig
from pdnode.daemon.figures import Figures
from pdnode.daemon.lifecycle import Lifecycle, Phase, Restarts
from pdnode.daemon.notify import Notifier, extend
from pdnode.daemon.supervise import EXTEND_S, Progress, Supervisor
from pdnode.obs.warnings import Condition, Warnings
from pdnode.types import BootId, Role

EXTEND = extend(EXTEND_S)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def heard(listener: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(listener.recv(4096).decode())
        except BlockingIOError:
            return found


@dataclass
class Parts:
    """Engine with its one group, transfer and fabric, as far as progress is concerned.

    `core`: turns of the core's first thread; the second one always turns."""

    layers: int = 0
    core: int = 0
    has_work: bool = True
    died: Future[None] = field(default_factory=Future)
    wake_fds: list[int] = field(
        default_factory=lambda: [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    )

    @property
    def groups(self) -> "list[Parts]":
        return [self]

    @property
    def worker(self) -> "Parts":
        return self

    @property
    def steps(self) -> "Parts":
        return self

    @property
    def fabric(self) -> "Parts":
        return self

    def layers_done(self) -> int:
        assert not self.died.done(), "its descriptors are closed"
        return self.layers

    def __post_init__(self) -> None:
        self._others = count(1)

    def turns(self) -> list[int]:
        return [self.core, next(self._others)]


def figures(parts: Parts | None = None, *, warnings: Warnings | None = None) -> Figures:
    config = Config(NodeConfig("n", Role.DECODE), ModelConfig(Path("m"), "m"))
    found = Figures(config, cast(Any, None), warnings or Warnings(lambda: 0.0), BootId("b" * 32))
    if parts is not None:
        found = replace(found, engine=cast(Any, parts), transfer=cast(Any, parts))
    return found


def notifier(listener: socket.socket, **more: str) -> Notifier:
    return Notifier({"NOTIFY_SOCKET": listener.getsockname(), **more})


def test_the_variables_are_taken_out_of_the_environment() -> None:
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "4000000", "WATCHDOG_PID": str(os.getpid())}
    found = Notifier(environ)
    assert environ == {}
    assert found.watchdog_s == 4.0
    found.close()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "x"},
        {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"},
    ],
)
def test_no_watchdog(environ: dict[str, str]) -> None:
    assert Notifier(dict(environ)).watchdog_s is None


def test_an_abstract_socket_and_one_that_is_gone() -> None:
    name = f"pdnode-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        found = Notifier({"NOTIFY_SOCKET": f"@{name}"})
        found.send("READY=1", "STATUS=x")
        assert sock.recv(100) == b"READY=1\nSTATUS=x"
    found.send("STOPPING=1")  # nobody hears it


def test_a_life_as_the_supervisor_hears_it(listener: socket.socket) -> None:
    life, detail = Lifecycle(Restarts(5)), ["weights 40%"]
    warnings = Warnings(lambda: 0.0)
    conditions: list[Condition] = []
    warnings.add_source(lambda: conditions)
    supervisor = Supervisor(notifier(listener), life, figures(warnings=warnings), lambda: detail[0])
    supervisor.look()
    supervisor.look()  # the same again: only the timeout is extended
    assert heard(listener) == [f"STATUS=starting: weights 40%\n{EXTEND}", EXTEND]
    detail[0] = ""
    life.enter(Phase.SERVING)
    supervisor.look()
    assert heard(listener) == ["READY=1\nSTATUS=serving as decode"]
    conditions.append(Condition("W102", "draining"))
    supervisor.look()
    assert heard(listener) == ["STATUS=serving as decode; W102 draining"]
    supervisor.reload(True)
    supervisor.reload(False)
    began, ended = heard(listener)
    assert began.startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert ended == "READY=1"
    detail[0] = "3 requests and 2 transfers are left"
    life.enter(Phase.DRAINING)
    supervisor.look()
    supervisor.reload(True)  # not while it stops
    life.enter(Phase.STOPPED)
    assert heard(listener) == [
        f"STOPPING=1\n{EXTEND}\nSTATUS=draining: {detail[0]}",
        EXTEND,
        f"STOPPING=1\nSTATUS=stopped: {detail[0]}",
    ]


@pytest.mark.parametrize(
    ("layers", "turns", "has_work", "moved"),
    [(1, 1, True, True), (0, 1, True, False), (0, 1, False, True), (1, 0, True, False)],
)
def test_progress_needs_both_engine_and_core(
    layers: int, turns: int, has_work: bool, moved: bool
) -> None:
    parts = Parts(has_work=has_work)
    progress = Progress(figures(parts))
    progress.moved()
    assert [os.eventfd_read(fd) for fd in parts.wake_fds] == [1, 1]  # all threads are asked to turn
    parts.layers += layers
    parts.core += turns
    assert progress.moved() is moved


def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    """Of several groups one dies, the others are closed, and the node clears up behind them."""
    parts = Parts()
    progress = Progress(figures(parts))
    parts.died.set_result(None)
    assert progress.moved()
    parts.core += 1
    assert progress.moved()


async def test_a_look_that_fails_is_reported_and_not_the_last_one(listener: socket.socket) -> None:
    life, asked = Lifecycle(Restarts(5)), 0

    def detail() -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise IndexError("closed")
        return "still there"

    supervisor = Supervisor(notifier(listener), life, figures(), detail)
    supervisor.interval_s = 0.01
    faults: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))
    task = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(30):
        while not (found := heard(listener)):
            await asyncio.sleep(0.01)
    assert found[0].startswith("STATUS=starting: still there")
    assert [type(fault) for fault in faults] == [IndexError]
    task.cancel()


def test_the_watchdog_is_fed_only_while_the_work_moves(listener: socket.socket) -> None:
    parts = Parts()
    life = Lifecycle(Restarts(5))
    supervisor = Supervisor(
        notifier(listener, WATCHDOG_USEC="4000000"), life, figures(parts), lambda: ""
    )
    assert supervisor.interval_s == 0.5
    life.enter(Phase.SERVING)
    supervisor.look()
    heard(listener)
    parts.core += 1
    supervisor.look()
    assert heard(listener) == []
    parts.core += 1
    parts.layers += 1
    supervisor.look()
    assert heard(listener) == ["WATCHDOG=1"]


def test_without_an_engine_the_event_loop_is_enough(listener: socket.socket) -> None:
    supervisor = Supervisor(
        notifier(listener, WATCHDOG_USEC="4000000"), Lifecycle(Restarts(5)), figures(), lambda: "x"
    )
    supervisor.look()
    assert heard(listener)[-1].endswith("WATCHDOG=1")


def test_a_status_is_one_short_line(listener: socket.socket) -> None:
    [line] = notifier(listener).status("a\nb" + "x" * 500)
    assert line == "STATUS=a b" + "x" * 197
