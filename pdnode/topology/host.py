"""The records of a host: where a device sits, GPUs, NICs, and how far two of them are apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from pdnode.topology.cpus import NO_CPUS, CpuSet, NumaNode
from pdnode.topology.sysfs import natural

UNKNOWN_NODE = -1
"""As the kernel writes numa_node where the firmware says nothing."""


class Distance(IntEnum):
    """The classes of `nvidia-smi topo`, nearest first."""

    PIX = 0  # the same PCIe switch: at most one bridge on either side below the common one
    PXB = 1  # a common bridge, but a deeper one
    PHB = 2  # the same host bridge (or the same CPU in a topology file)
    NODE = 3  # the same NUMA node
    SYS = 4  # another NUMA node, or not known to be the same


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device sits. `cpus` are those of the nearest node, or all if the node is unknown."""

    pci: str | None  # as sysfs writes it; None: not known
    root: str  # host bridge, such as pci0000:44, or the CPU of a topology file; "": not known
    bridges: tuple[str, ...]  # from the host bridge down, without the device
    numa: int  # as the host says, UNKNOWN_NODE if it does not
    home: int  # the nearest node that has CPUs, UNKNOWN_NODE if not known
    cpus: CpuSet = NO_CPUS


@dataclass(frozen=True, slots=True)
class Gpu:
    place: Place
    model: str = ""  # as the driver names it, where it does


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device, or a network interface for the provider tcp."""

    name: str
    place: Place
    provider: str  # the libfabric provider that drives it: efa | verbs | tcp
    rate_gbps: float | None = None  # of the port, as the host says
    link_gbps: float | None = None  # of the PCIe slot, one direction
    state: str = ""  # ACTIVE, DOWN …; "": not known
    link_layer: str = ""  # InfiniBand | Ethernet; "": not known or neither
    parent: str | None = None  # PCI address of the physical function of a virtual one
    interfaces: tuple[str, ...] = ()  # network interfaces on the same PCI function

    @property
    def effective_gbps(self) -> float:
        """What can pass: port or slot, the narrower; 0 if neither is known."""
        return min((r for r in (self.rate_gbps, self.link_gbps) if r is not None), default=0.0)


def nic_order(nic: Nic) -> tuple[bool, str, list[tuple[int, str]]]:
    """Sort key: by PCI address, those without one last; ports of one function by their numbers."""
    return nic.place.pci is None, nic.place.pci or "", natural(nic.name)


@dataclass(frozen=True, slots=True)
class Host:
    """GPUs by PCI address, NICs by PCI address and name."""

    nodes: tuple[NumaNode, ...]
    cores: tuple[CpuSet, ...]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    problems: tuple[str, ...] = field(default=())

    @property
    def cpus(self) -> CpuSet:
        return frozenset().union(*self.cores)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def distance(one: Place, other: Place) -> Distance:
    """Devices without a known host bridge or node are never near to each other by a guess."""
    if one.root and one.root == other.root:
        shared = _common(one.bridges, other.bridges)
        if shared == 0:
            return Distance.PHB
        below = max(len(one.bridges), len(other.bridges)) - shared
        return Distance.PIX if below <= 1 else Distance.PXB
    same_node = one.home == other.home != UNKNOWN_NODE
    return Distance.NODE if same_node else Distance.SYS
