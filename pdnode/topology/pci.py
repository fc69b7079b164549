"""PCI devices of a sysfs tree: addresses, bridges, classes, link rates, NUMA nodes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pdnode.topology.cpus import NO_CPUS, CpuSet, NumaNode, nearest_with_cpus, read_local_cpus
from pdnode.topology.host import UNKNOWN_NODE, Place
from pdnode.topology.sysfs import Sysfs, parse_integer

DEVICES = ("bus", "pci", "devices")
NVIDIA, AMD, AMAZON = 0x10DE, 0x1002, 0x1D0F

_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_RATE = re.compile(r"(\d{1,4}(?:\.\d{1,4})?) ?GT/s")

# Base class and subclass. A plain VGA controller is a GPU only where NVIDIA made it: every server
# has one in its board controller, some of them from AMD.
_GPU_CLASSES: dict[int | None, tuple[int, ...]] = {
    NVIDIA: (0x0300, 0x0302),
    AMD: (0x0302, 0x0380, 0x1200),
    None: (0x0302, 0x1200),
}
_NIC_CLASSES = (0x0C06,)
_NETWORK = 0x02


def normal_address(text: str) -> str | None:
    """A PCI address as sysfs writes it: lower case, a domain of 4 hex digits or as many as it
    needs (drivers write 8). None if it is none."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def is_gpu(class_code: int, vendor: int | None) -> bool:
    """`class_code` has three bytes: 0x030200. A vendor that is not known (None) may be one."""
    kinds = _GPU_CLASSES.get(vendor, ())
    return class_code >> 8 in kinds


def is_nic(class_code: int) -> bool:
    return class_code >> 16 == _NETWORK or class_code >> 8 in _NIC_CLASSES


def link_gbps(speed: str | None, width: str | None) -> float | None:
    """One direction of a PCIe link: 32 GT/s x16 → 504.1. None for "Unknown" and zero."""
    match = _RATE.match(speed or "")
    lanes = parse_integer(width) or 0
    if match is None or not 0 < lanes <= 64:
        return None
    rate = float(match[1])
    # 8b/10b below Gen3, 128b/130b from there on (Gen6 flits cost about as little).
    return rate * lanes * (128 / 130 if rate >= 8 else 0.8) or None


@dataclass(frozen=True, slots=True)
class PciDevice:
    address: str
    class_code: int
    vendor: int | None
    root: str  # "" where the tree does not show it
    bridges: tuple[str, ...]


def _location(sysfs: Sysfs, address: str) -> tuple[str, tuple[str, ...]]:
    """Host bridge and bridges, from the text of the link to the device."""
    parts = sysfs.link(*DEVICES, address)
    for index, part in enumerate(parts):
        # Below some controllers (VMD, Hyper-V) the root is deeper: the last one counts.
        if _ROOT.fullmatch(part) and not any(map(_ROOT.fullmatch, parts[index + 1 :])):
            return part, tuple(p for p in parts[index + 1 : -1] if normal_address(p) == p)
    return "", ()


def read_devices(sysfs: Sysfs) -> dict[str, PciDevice]:
    """By address. A device without a readable class is left out."""
    devices = {}
    for name in sysfs.names(*DEVICES):
        code = sysfs.integer(*DEVICES, name, "class")
        if code is not None and normal_address(name) == name:
            root, bridges = _location(sysfs, name)
            vendor = sysfs.integer(*DEVICES, name, "vendor")
            devices[name] = PciDevice(name, code, vendor, root, bridges)
    return devices


def read_link_gbps(sysfs: Sysfs, device: PciDevice) -> float | None:
    """The widest that device and slot can do. The present rate counts only where the maximum is not
    given: idle devices fall back to 2.5 GT/s."""
    known = []
    for address in (device.address, *device.bridges[-1:]):
        for which in ("max", "current"):
            speed = sysfs.text(*DEVICES, address, f"{which}_link_speed")
            rate = link_gbps(speed, sysfs.text(*DEVICES, address, f"{which}_link_width"))
            if rate is not None and (which == "max" or address == device.address):
                known.append(rate)
                break
    return min(known, default=None)


class Locator:
    """Finds the NUMA node and the near CPUs of PCI devices, and notes what contradicts itself."""

    def __init__(self, sysfs: Sysfs, nodes: tuple[NumaNode, ...], online: CpuSet) -> None:
        self._sysfs = sysfs
        self._nodes = nodes
        self._online = online
        self.problems: list[str] = []

    def place(self, device: PciDevice) -> Place:
        numa, by_cpus = self._node_of(device)
        near = nearest_with_cpus(numa, self._nodes)
        local = read_local_cpus(self._sysfs, *DEVICES, device.address)
        if by_cpus:
            cpus = local
        elif near is not None:
            cpus = near.cpus
        elif numa == UNKNOWN_NODE:
            cpus = self._online or local
        else:
            cpus = local or self._online
        home = near.number if near is not None else numa
        if near is None and self._nodes:
            # Near to no node with CPUs, unless there is only one.
            with_cpus = [node.number for node in self._nodes if node.cpus]
            home = with_cpus[0] if len(with_cpus) == 1 else UNKNOWN_NODE
        return Place(device.address, device.root, device.bridges, numa, home, cpus)

    def unplaced(self) -> Place:
        """For a device whose PCI address is not known."""
        return Place(None, "", (), UNKNOWN_NODE, UNKNOWN_NODE, self._online)

    def _node_of(self, device: PciDevice) -> tuple[int, bool]:
        """(node, whether it follows from the local CPUs only): its own word, else that of the
        bridge nearest to it, else the one node that holds all its local CPUs."""
        known = {node.number for node in self._nodes}
        local = read_local_cpus(self._sysfs, *DEVICES, device.address)
        for address in (device.address, *reversed(device.bridges)):
            number = self._sysfs.integer(*DEVICES, address, "numa_node")
            if number is None or number < 0:
                continue
            if known and number not in known:
                self.problems.append(f"{address}: numa_node {number} is no node of this host")
                continue
            if address == device.address:
                self._compare(device.address, number, local)
            return number, False
        holders = [node.number for node in self._nodes if local and local <= node.cpus]
        return (holders[0], True) if holders else (UNKNOWN_NODE, False)

    def _compare(self, address: str, number: int, local: CpuSet) -> None:
        own = next((node.cpus for node in self._nodes if node.number == number), NO_CPUS)
        if own and local and not local <= own:
            self.problems.append(
                f"{address}: numa_node {number} and local_cpulist contradict each other; "
                f"the node is believed"
            )


def pci_of(parts: Sequence[str]) -> str | None:
    """The last PCI address in the components of a path."""
    return next((p for p in reversed(parts) if normal_address(p) == p), None)
