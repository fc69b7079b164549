"""CPU numbers as the kernel writes them, NUMA nodes, physical cores."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdnode.topology.sysfs import Sysfs, parse_integer

CpuSet = frozenset[int]

MAX_CPU = 1 << 14
"""Above the largest NR_CPUS of a kernel (8192): a larger number is not a CPU."""

NO_CPUS: CpuSet = frozenset()


def parse_cpulist(text: str) -> CpuSet:
    """ "0-3,8" → {0, 1, 2, 3, 8}. ValueError for anything else; the empty text is no CPU."""
    cpus: set[int] = set()
    for piece in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = piece.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < MAX_CPU:
            raise ValueError(f"no range of CPUs: {piece!r}")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def parse_cpumask(text: str) -> CpuSet:
    """Hexadecimal words of 32 bits, highest first; leading zeros or a whole zero word may be left
    out ("ff,,1" is CPUs 64..71 and 0). ValueError for anything else."""
    words = text.strip().split(",")
    if len(words) > MAX_CPU // 32:
        raise ValueError("too many words in a CPU mask")
    mask = 0
    for word in words:
        value = int(word, 16) if word else 0
        # A mask of one word may be as long as it likes: "fff0000000000" is not split.
        if value < 0 or (len(words) > 1 and value >= 1 << 32) or value >= 1 << MAX_CPU:
            raise ValueError(f"no 32-bit word: {word!r}")
        mask = mask << 32 | value
    return frozenset(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def format_cpulist(cpus: Iterable[int]) -> str:
    """{0, 1, 2, 3, 8} → "0-3,8", as the kernel writes it."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Nodes may have gaps in their numbers, and no CPUs (GPU memory, CXL)."""

    number: int
    cpus: CpuSet
    distances: tuple[int, ...] = ()  # to every node of the host, in the order of their numbers


def read_cpulist(sysfs: Sysfs, *parts: str) -> CpuSet:
    """No CPUs where the file is missing, empty or unreadable."""
    try:
        return parse_cpulist(sysfs.text(*parts) or "")
    except ValueError:
        return NO_CPUS


def read_nodes(sysfs: Sysfs) -> tuple[NumaNode, ...]:
    base = ("devices", "system", "node")
    nodes = []
    for name in sysfs.names(*base):
        number = name.removeprefix("node")
        if name.startswith("node") and number.isdecimal():
            cpus = read_cpulist(sysfs, *base, name, "cpulist")
            cpus = cpus or _mask(sysfs, *base, name, "cpumap")
            texts = (sysfs.text(*base, name, "distance") or "").split()
            known = [d for d in map(parse_integer, texts) if d is not None]
            distances = tuple(known) if len(known) == len(texts) else ()
            nodes.append(NumaNode(int(number), cpus, distances))
    return tuple(nodes)


def _mask(sysfs: Sysfs, *parts: str) -> CpuSet:
    try:
        return parse_cpumask(sysfs.text(*parts) or "")
    except ValueError:
        return NO_CPUS


def read_local_cpus(sysfs: Sysfs, *device: str) -> CpuSet:
    """What the kernel holds for near to a PCI device: the list, else the mask."""
    return read_cpulist(sysfs, *device, "local_cpulist") or _mask(sysfs, *device, "local_cpus")


def read_online(sysfs: Sysfs, nodes: tuple[NumaNode, ...]) -> CpuSet:
    online = read_cpulist(sysfs, "devices", "system", "cpu", "online")
    return online or frozenset().union(*(node.cpus for node in nodes))


def read_cores(sysfs: Sysfs, online: CpuSet, nodes: tuple[NumaNode, ...]) -> tuple[CpuSet, ...]:
    """Physical cores, each as its hardware threads, by their lowest CPU."""
    cores: list[CpuSet] = []
    seen: set[int] = set()
    for cpu in sorted(online):
        if cpu in seen:
            continue
        path = ("devices", "system", "cpu", f"cpu{cpu}", "topology")
        siblings = read_cpulist(sysfs, *path, "thread_siblings_list") & online
        siblings = siblings or _mask(sysfs, *path, "thread_siblings") & online
        if cpu not in siblings:
            return guess_cores(online, nodes)
        seen |= siblings
        cores.append(siblings)
    return tuple(cores)


def guess_cores(online: CpuSet, nodes: tuple[NumaNode, ...]) -> tuple[CpuSet, ...]:
    """Cores where the siblings are not known: a node whose CPUs are two runs of equal length is
    taken to number the second threads of its cores in the second run, as Linux does on x86."""
    cores: list[CpuSet] = []
    for node in nodes:
        cpus = sorted(node.cpus & online)
        half = len(cpus) // 2
        paired = [cpus[:half], cpus[half:]]
        runs = all(run and run[-1] - run[0] == len(run) - 1 for run in paired)
        if runs and len(cpus) % 2 == 0 and cpus[half] != cpus[half - 1] + 1:
            cores += [frozenset(pair) for pair in zip(*paired, strict=True)]
        else:
            cores += [frozenset({cpu}) for cpu in cpus]
    known = frozenset().union(*cores)
    cores += [frozenset({cpu}) for cpu in online - known]
    return tuple(sorted(cores, key=min))


def nearest_with_cpus(number: int, nodes: tuple[NumaNode, ...]) -> NumaNode | None:
    """The node itself if it has CPUs, else the nearest one that has; None where unknown."""
    own = next((node for node in nodes if node.number == number), None)
    if own is None or own.cpus:
        return own
    if len(own.distances) != len(nodes):
        return None
    near = [(own.distances[index], node) for index, node in enumerate(nodes) if node.cpus]
    return min(near, key=lambda pair: pair[0], default=(0, None))[1]
