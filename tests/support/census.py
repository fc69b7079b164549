"""What the processes of a node hold: resident memory and descriptors."""

import asyncio
from pathlib import Path
from typing import NamedTuple

from tests.support.nodes import RunningNode

STEADY_READINGS = 5


class Holding(NamedTuple):
    """Of one process."""

    resident_bytes: int
    descriptors: int


def holding(pid: int) -> Holding:
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return Holding(int(resident.split()[1]) << 10, len(list(Path(f"/proc/{pid}/fd").iterdir())))


def census(*nodes: RunningNode) -> dict[str, Holding]:
    """Of the daemon and the worker of each node, by `<node> daemon` and `<node> worker`."""
    found = {}
    for node in nodes:
        (worker,) = node.children()
        found[f"{node.spec.name} daemon"] = holding(node.process.pid)
        found[f"{node.spec.name} worker"] = holding(worker)
    return found


def descriptors(found: dict[str, Holding]) -> dict[str, int]:
    return {name: one.descriptors for name, one in found.items()}


async def settled(*nodes: RunningNode) -> dict[str, Holding]:
    """The census once the descriptors stay the same: connections that were closed are gone."""
    same, before = 0, descriptors(census(*nodes))
    async with asyncio.timeout(30):
        while True:
            await asyncio.sleep(0.1)
            found = census(*nodes)
            same = same + 1 if descriptors(found) == before else 0
            if same == STEADY_READINGS:
                return found
            before = descriptors(found)


def grown_bytes(before: dict[str, Holding], after: dict[str, Holding]) -> dict[str, int]:
    """Resident memory, by process."""
    assert before.keys() == after.keys(), "a process was replaced"
    return {name: after[name].resident_bytes - before[name].resident_bytes for name in before}
