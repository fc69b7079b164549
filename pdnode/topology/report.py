"""What `pdnode topology` prints: JSON with fixed keys, or a tree for people."""

from collections.abc import Iterator
from typing import Any

from pdnode.topology.cpus import format_cpulist
from pdnode.topology.host import UNKNOWN_NODE, Place
from pdnode.topology.place import GpuPlacement, Placement
from pdnode.topology.usable import Verdict


def as_json(placement: Placement) -> dict[str, Any]:
    """Nearest NICs first; numa −1, rate_gbps and pci null where they are not known."""
    return {
        "gpus": [
            {
                "pci": at.gpu.place.pci,
                "numa": at.gpu.place.numa,
                "cpus": format_cpulist(at.gpu.place.cpus),
                "nics": [
                    {
                        "name": rail.nic.name,
                        "pci": rail.nic.place.pci,
                        "distance": rail.distance.name,
                        "rate_gbps": rail.nic.rate_gbps,
                        "assigned": rail.assigned,
                        "reason": rail.reason,
                    }
                    for rail in at.rails
                ],
            }
            for at in placement.gpus
        ],
        "nics": [
            {
                "name": verdict.nic.name,
                "pci": verdict.nic.place.pci,
                "numa": verdict.nic.place.numa,
                "rate_gbps": verdict.nic.rate_gbps,
                "usable": verdict.usable,
                "reason": verdict.reason,
            }
            for verdict in placement.nics
        ],
        "problems": list(placement.problems),
    }


def as_lines(placement: Placement) -> Iterator[str]:
    """A tree GPU – NIC with the assigned NICs (marked *) and those that are as near as they are."""
    if not placement.gpus:
        yield "no GPU"
    for at in placement.gpus:
        yield from _gpu_lines(at)
    yield "NICs" if placement.nics else "no NIC"
    idle = _idle(placement)
    for verdict in placement.nics:
        line = f"  {_nic_name(verdict)}: {'' if verdict.usable else 'not used: '}{verdict.reason}"
        yield line + idle.get(verdict.nic.name, "")
    for problem in placement.problems:
        yield f"problem: {problem}"


def _idle(placement: Placement) -> dict[str, str]:
    """What is added to usable NICs that no GPU has: why the one that is nearest to it has not."""
    usable = {verdict.nic.name for verdict in placement.nics if verdict.usable}
    rails = [rail for at in placement.gpus for rail in at.rails]
    used = {rail.nic.name for rail in rails if rail.assigned}
    rails.sort(key=lambda rail: rail.distance, reverse=True)  # the nearest is kept
    return {
        rail.nic.name: f"; of no GPU: {rail.reason}"
        for rail in rails
        if rail.nic.name in usable - used
    }


def _gpu_lines(at: GpuPlacement) -> Iterator[str]:
    place = at.gpu.place
    model = f" {at.gpu.model}" if at.gpu.model else ""
    yield f"GPU {place.pci}{model}, {_node(place)}"
    if at.threads.progress >= 0:
        worker = format_cpulist(at.threads.worker)
        yield f"  progress thread on CPU {at.threads.progress}, worker on CPUs {worker}"
    nearest = at.rails[0].distance if at.rails else None
    for rail in at.rails:
        if rail.assigned or rail.distance == nearest:
            mark = "*" if rail.assigned else " "
            yield f"  {mark} {rail.nic.name} ({rail.nic.place.pci}) {rail.reason}"


def _node(place: Place) -> str:
    if place.numa == UNKNOWN_NODE:
        return "NUMA node unknown"
    cpus = format_cpulist(place.cpus)
    return f"NUMA node {place.numa}" + (f", CPUs {cpus}" if cpus else "")


def _nic_name(verdict: Verdict) -> str:
    place = verdict.nic.place
    node = "?" if place.numa == UNKNOWN_NODE else place.numa
    return f"{verdict.nic.name} ({place.pci or 'no PCI address'}, node {node})"
