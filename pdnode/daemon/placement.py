"""How this node's device groups lie to each other, and which CPUs its threads get where [topology]
pin asks for it."""

import logging
from dataclasses import dataclass
from pathlib import Path

from pdnode.config import Config
from pdnode.obs.log import event
from pdnode.topology.cpus import format_cpulist
from pdnode.topology.detect import detect, find_nic
from pdnode.topology.groups import nearest_groups
from pdnode.topology.host import Host, Nic
from pdnode.topology.ncclxml import override, read_topology_file
from pdnode.topology.threads import (
    GroupThreads,
    allowed_cpus,
    place_group_threads,
    place_host_threads,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """By device group: `progress`, the CPU of its thread, −1: the kernel places it; `near`, the
    groups in the order of their distance. `worker`: CPUs of the workers; empty: all."""

    progress: tuple[int, ...] = (-1,)
    worker: tuple[int, ...] = ()
    near: tuple[tuple[int, ...], ...] = ((0,),)


NOT_PLACED = Placed()
"""One group, and the kernel places all threads."""


def choose_places(config: Config) -> Placed:
    """Reads /sys for some milliseconds. ConfigError if the topology file cannot be read."""
    count = max((nic.group for nic in config.fabric.nics), default=0) + 1
    if count == 1 and not config.topology.pin:
        return NOT_PLACED
    host = detect()
    if config.topology.file:
        host = override(host, read_topology_file(Path(config.topology.file)))
    groups: list[list[Nic]] = [[] for _ in range(count)]
    for nic in config.fabric.nics:
        if (found := find_nic(host, nic.name)) is not None:
            groups[nic.group].append(found)
    near = nearest_groups(groups)
    if count > 1:
        homes = rank_homes(config, count)
        event(
            _log, logging.INFO, "topology.groups", "NICs are in device groups",
            groups="; ".join(_group_text(config, homes, number) for number in range(count)),
        )  # fmt: skip
    if not config.topology.pin:
        return Placed((-1,) * count, (), near)
    threads = _pin(host, groups)
    return Placed(threads.progress, threads.worker, near)


def rank_homes(config: Config, groups: int) -> tuple[int, ...]:
    """Device group of each rank: as the host chose, else dealt in order."""
    ranks = config.engine.tp * config.engine.dp
    return config.fabric.homes or tuple(rank * groups // ranks for rank in range(ranks))


def _group_text(config: Config, homes: tuple[int, ...], group: int) -> str:
    """ "0: mlx5_0, mlx5_1 for rank 0" """
    nics = ", ".join(nic.name for nic in config.fabric.nics if nic.group == group)
    ranks = ", ".join(str(rank) for rank, home in enumerate(homes) if home == group)
    return f"{group}: {nics} for rank {ranks}"


def _pin(host: Host, groups: list[list[Nic]]) -> GroupThreads:
    if len(groups) > 1:
        threads = place_group_threads(host, groups, allowed_cpus())
    else:
        one = place_host_threads(host, groups[0], allowed_cpus())
        threads = GroupThreads((one.progress,), one.worker, one.problem)
    event(
        _log, logging.WARNING if threads.problem else logging.INFO, "topology.pinned", "pinned",
        progress_cpu=format_cpulist(threads.progress), worker_cpus=format_cpulist(threads.worker),
        problem=threads.problem,
    )  # fmt: skip
    return threads
