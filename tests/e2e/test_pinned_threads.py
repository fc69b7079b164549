"""`[topology] pin`: the threads of a real node are where placement put them."""

import os
from pathlib import Path

import pytest

from tests.support.nodes import NodeSpec, clients, nodes

pytestmark = pytest.mark.timeout(240)


def affinities(pid: int) -> dict[str, set[frozenset[int]]]:
    """CPU sets of a process's threads, by the threads' names."""
    found: dict[str, set[frozenset[int]]] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        found.setdefault(name, set()).add(frozenset(os.sched_getaffinity(int(task.name))))
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
async def test_transfer_thread_and_worker_have_cpus_of_their_own(
    tiny_model: Path, tmp_path: Path
) -> None:
    spec = NodeSpec("pf", "prefill", tiny_model, tmp_path, topology={"pin": True})
    with nodes(spec) as (node,):
        async with clients(spec) as (client,):
            await client.wait_ready(node)
        (progress,) = affinities(node.process.pid)["fabric-0"]
        (worker,) = node.children()
        used = {cpus for sets in affinities(worker).values() for cpus in sets}
    assert len(progress) == 1
    assert len(used) == 1
    assert not progress & next(iter(used))
