"""Nodes with nothing to do: what their processes cost."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.support.nodes import NodeSpec, RunningNode, cluster
from tests.support.prompts import random_prompt

QUIET_S = 10
MEASURED_S = 60
MOST_RATIO = 0.02  # of one core, daemon and worker together

pytestmark = pytest.mark.timeout(150)


def cpu_s(node: RunningNode) -> float:
    """User and system time of the daemon and its worker, in seconds."""
    ticks = 0
    for pid in (node.process.pid, *node.children()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime, stime
    return ticks / os.sysconf("SC_CLK_TCK")


async def test_idle_nodes_cost_little(tiny_model: Path, tmp_path: Path) -> None:
    """Default poll, session up, one request done."""
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path)
    decode = NodeSpec("dc", "decode", tiny_model, tmp_path, (prefill,))
    async with cluster(prefill, decode) as (running, (_, d)):
        assert len(await d.tokens(random_prompt(100, seed=1), 4)) == 4
        await asyncio.sleep(QUIET_S)
        assert all(len(node.children()) == 1 for node in running)
        before = [cpu_s(node) for node in running]
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(MEASURED_S)
        measured_s = asyncio.get_running_loop().time() - began
        used = [(cpu_s(node) - was) / measured_s for node, was in zip(running, before, strict=True)]
        sys.stdout.write(f"prefill {used[0]:.2%}, decode {used[1]:.2%} of a core\n")
        assert max(used) < MOST_RATIO
        assert len(await d.tokens(random_prompt(100, seed=1), 4)) == 4
