"""CPUs for threads: those of the nearest node, one physical core a thread, none used twice."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdnode.topology.cpus import CpuSet
from pdnode.topology.host import Host, Nic


@dataclass(frozen=True, slots=True)
class Threads:
    """`progress`: the CPU of the transfer core's thread, −1 for none. `worker`: CPUs of the worker
    process, one per physical core. `problem`: why they are not the ones that were wanted."""

    progress: int
    worker: tuple[int, ...]
    problem: str = ""


def allowed_cpus() -> CpuSet:
    """CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def place_threads(host: Host, allowed: CpuSet | None = None) -> list[Threads]:
    """Threads for every GPU, in their order. GPUs with the same CPUs divide their cores evenly;
    where these are fewer than two for each GPU the last ones share. Where the CPUs of the
    host are not known there are none.

    `allowed`: only these CPUs, default all of the host.
    """
    cores = _usable(host.cores, allowed)
    taken: set[int] = set()
    out: list[Threads] = []
    homes = [gpu.place.cpus for gpu in host.gpus]
    for number, gpu in enumerate(host.gpus):
        # What is near may be less than the node: it is widened before anything is shared.
        node = frozenset().union(*(n.cpus for n in host.nodes if n.number == gpu.place.home))
        for home in (homes[number], homes[number] | node):
            near = [core for core in cores if core[0] in home and core[0] not in taken]
            waiting = sum(1 for other in homes[number:] if other & home)
            share = near[: max(len(near) // max(1, waiting), min(2, len(near)))]
            if len(share) >= 2:
                break
        problem = ""
        if cores and len(share) < 2:
            share = [core for core in cores if core[0] in home][:2] or cores[:2]
            problem = "fewer than two physical cores a GPU on its node: threads share cores"
        taken.update(core[0] for core in share)
        out.append(_split(share, problem))
    return out


def place_host_threads(host: Host, nics: Iterable[Nic], allowed: CpuSet) -> Threads:
    """Threads of a node without a GPU: on the node that most of its NICs are near to, else on all
    CPUs."""
    homes = [nic.place.cpus for nic in nics if nic.place.home >= 0]
    cores = _usable(host.cores, allowed)
    home = max(homes, key=homes.count, default=host.cpus)
    near = [core for core in cores if core[0] in home]
    if len(near) >= 2:
        return _split(near, "")
    return _split(cores, "" if len(cores) >= 2 else "fewer than two physical cores")


@dataclass(frozen=True, slots=True)
class GroupThreads:
    """`progress`: a CPU for each device group's thread, −1 for none. The rest as in Threads."""

    progress: tuple[int, ...]
    worker: tuple[int, ...]
    problem: str = ""


def place_group_threads(
    host: Host, groups: Sequence[Sequence[Nic]], allowed: CpuSet
) -> GroupThreads:
    """Threads of a node whose NICs are in several device groups: each group's on the node that most
    of its NICs are near to, the workers on what is left."""
    cores = _usable(host.cores, allowed)
    free = list(cores)
    progress = []
    for nics in groups:
        homes = [nic.place.cpus for nic in nics if nic.place.home >= 0]
        home = max(homes, key=homes.count, default=host.cpus)
        wanted = [core for core in free if core[0] in home] or free or cores or [[-1]]
        progress.append(wanted[0][0])
        free = [core for core in free if core is not wanted[0]]
    problem = "" if free else "fewer physical cores than device groups and a worker"
    return GroupThreads(tuple(progress), tuple(core[0] for core in free or cores), problem)


def _usable(cores: Sequence[CpuSet], allowed: CpuSet | None) -> list[list[int]]:
    """Cores as sorted CPUs, cut down to the allowed ones; the first of each stands for it."""
    cut = [sorted(core if allowed is None else core & allowed) for core in cores]
    return [core for core in cut if core]


def _split(share: list[list[int]], problem: str) -> Threads:
    """The first core to the progress thread, the rest to the worker; one core is shared."""
    if not share:
        return Threads(-1, (), problem)
    worker = share[1:] or share
    return Threads(share[0][0], tuple(core[0] for core in worker), problem)
