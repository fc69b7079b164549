"""What a real node says to its supervisor: start, reload, drain, and a worker that stands still."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.admin import admin_of
from tests.support.nodes import NodeSpec, alive, clients, cluster, nodes, until
from tests.support.streams import started_stream
from tests.support.supervisor import Listening

pytestmark = pytest.mark.timeout(240)

PROMPT = list(range(1, 40))


def word(line: str) -> str:
    """A line without what differs from run to run."""
    key, _, value = line.partition("=")
    return key if key in ("EXTEND_TIMEOUT_USEC", "MONOTONIC_USEC") else f"{key}={value}"


def milestones(lines: list[str]) -> list[str]:
    """Without repetitions and progress, which depend on the machine's speed."""
    found: list[str] = []
    for line in map(word, lines):
        if line == "EXTEND_TIMEOUT_USEC" or line.startswith("STATUS=starting"):
            line = line.partition(":")[0]
        if line not in found or line == "READY=1":
            found.append(line)
    return found


async def test_start_reload_and_drain(
    tiny_model: Path, tmp_path: Path, supervisor: Listening
) -> None:
    environment = {"NOTIFY_SOCKET": str(supervisor.path)}
    spec = NodeSpec("co", "colocated", tiny_model, tmp_path, env=environment)
    async with cluster(spec) as ((node,), (client,)):
        start = milestones(supervisor.lines())
        assert "READY=1" not in start[:2]
        assert start[0].startswith("STATUS=starting")
        assert start[1] == "EXTEND_TIMEOUT_USEC"
        assert start[-2:] == ["READY=1", "STATUS=serving as colocated"]

        said = len(supervisor.lines())
        async with admin_of(spec.admin) as admin:
            answer = await admin.post("reload")
            assert answer.text == "reloaded: nothing has changed"
        await until(lambda: len(supervisor.lines()) >= said + 3, "the reload is told")
        reloaded = [word(line) for line in supervisor.lines()[said:]]
        assert reloaded[:3] == ["RELOADING=1", "MONOTONIC_USEC", "READY=1"]

        said = len(supervisor.lines())
        config = node.spec.folder / "co.toml"
        config.write_text(config.read_text().replace("256MiB", "128MiB"))
        node.send_signal(signal.SIGHUP)
        await until(lambda: "W110" in " ".join(supervisor.lines()[said:]), "the warning is told")
        refused = [word(line) for line in supervisor.lines()[said:]]
        assert refused[:3] == ["RELOADING=1", "MONOTONIC_USEC", "READY=1"]
        assert "kv.pool_bytes" in refused[3]

        said = len(supervisor.lines())
        _, stream = await started_stream(client, PROMPT, 300)
        node.send_signal(signal.SIGTERM)
        await stream
        assert await node.ended() == 0
        stop = [word(line) for line in supervisor.lines()[said:]]
        assert stop[:2] == ["STOPPING=1", "EXTEND_TIMEOUT_USEC"]
        assert stop[2] == "STATUS=draining: 1 requests and 0 transfers are left"
        assert "READY=1" not in stop
        assert stop[-1].startswith("STATUS=stopped")


async def test_a_dead_worker_is_told_and_so_is_its_successor(
    tiny_model: Path, tmp_path: Path, supervisor: Listening
) -> None:
    environment = {"NOTIFY_SOCKET": str(supervisor.path)}
    spec = NodeSpec("co", "colocated", tiny_model, tmp_path, env=environment)
    async with cluster(spec) as ((node,), (client,)):
        said = len(supervisor.lines())
        os.kill(node.children()[0], signal.SIGKILL)
        await until(lambda: "READY=1" in supervisor.lines()[said:], "another engine", 60)
        lines = supervisor.lines()[said:]
        assert any(line.startswith("STATUS=restarting: attempt 1") for line in lines), lines
        await client.wait_ready(node)


async def test_a_frozen_worker_starves_the_watchdog(
    slow_model: Path, tmp_path: Path, supervisor: Listening
) -> None:
    """WatchdogSec=4. Fed while idle and while a request runs; not once its worker stands still.
    SIGABRT, as systemd sends it then, leaves all stacks in the log and ends the worker too.
    """
    environment = {"NOTIFY_SOCKET": str(supervisor.path), "WATCHDOG_USEC": "4000000"}
    spec = NodeSpec("co", "colocated", slow_model, tmp_path, env=environment)
    with nodes(spec) as (node,):
        async with clients(spec) as (client,):
            await client.wait_ready(node)
            idle_from = time.monotonic()
            await until(lambda: supervisor.last("WATCHDOG=1") > idle_from + 2, "idle, and fed")
            _, stream = await started_stream(client, PROMPT, 1500)
            busy_from = time.monotonic()
            await until(lambda: supervisor.last("WATCHDOG=1") > busy_from + 2, "busy, and fed")
            (worker,) = node.children()
            os.kill(worker, signal.SIGSTOP)
            stopped_at = time.monotonic()
            # 4 s after the last word systemd sends SIGABRT.
            await until(lambda: time.monotonic() > supervisor.last("WATCHDOG=1") + 4, "starved")
            assert supervisor.last("WATCHDOG=1") < stopped_at + 2
            node.send_signal(signal.SIGABRT)
            assert await node.ended() == -signal.SIGABRT
            await until(lambda: not alive(worker), "the frozen worker ends with its daemon")
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
    log = node.text()
    assert "Fatal Python error: Aborted" in log
    assert "most recent call first" in log
    assert "node.py" in log
