"""Writes trees that are laid out as /sys is: by hand, from hwloc's XML, from `lspci -vvv`."""

import gzip
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

GPU = ("0x030200", "0x10de")
MELLANOX = ("0x020700", "0x15b3")
EFA = ("0x020000", "0x1d0f")
_LINK = {0.2: ("2.5", 1), 0.5: ("5", 1), 1.0: ("2.5", 4), 2.0: ("5", 4), 4.0: ("5", 8)}
_LINK |= {3.938: ("32", 1), 15.754: ("16", 8), 31.508: ("16", 16), 63.015: ("32", 16)}


class HostTree:
    """A tree under `base`/sys. PCI addresses may be given short, such as 1a:00.0."""

    def __init__(self, base: Path) -> None:
        self.root = base / "sys"
        for folder in ("devices/system/node", "class/infiniband", "class/net", "bus/pci/devices"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    def write(self, path: Path | str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def link(self, path: str, target: Path) -> None:
        """A relative link, as the kernel's are."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(Path(*[".."] * (len(Path(path).parts) - 1)) / target)

    def node(self, number: int, cpulist: str, distance: str = "") -> None:
        self.write(f"devices/system/node/node{number}/cpulist", cpulist)
        if distance:
            self.write(f"devices/system/node/node{number}/distance", distance)

    def cores(self, siblings: Iterable[str]) -> None:
        """One list of hardware threads per core, each "3" or "3,7"."""
        cpus = []
        for core in siblings:
            for cpu in core.split(","):
                cpus.append(cpu)
                path = f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
                self.write(path, core)
        self.write("devices/system/cpu/online", ",".join(cpus))

    def pci(
        self,
        address: str,
        kind: tuple[str, str],
        *,
        under: tuple[str, ...] = (),
        root: str = "pci0000:00",
        numa: int | None = None,
        cpulist: str = "",
        link: tuple[str, int] | None = None,
    ) -> Path:
        """A device below the bridges `under` of host bridge `root`; `link` is (GT/s, lanes)."""
        address = full(address)
        folder = Path("devices", root, *map(full, under), address)
        self.write(folder / "class", kind[0])
        self.write(folder / "vendor", kind[1])
        if numa is not None:
            self.write(folder / "numa_node", str(numa))
        if cpulist:
            self.write(folder / "local_cpulist", cpulist)
        if link is not None:
            self.write(folder / "current_link_speed", f"{link[0]} GT/s PCIe")
            self.write(folder / "current_link_width", str(link[1]))
        self.link(f"bus/pci/devices/{address}", folder)
        for depth, bridge in enumerate(under):
            if not (self.root / f"bus/pci/devices/{full(bridge)}").is_symlink():
                self.pci(bridge, ("0x060400", "0x1000"), under=under[:depth], root=root)
        return folder

    def rdma(
        self,
        name: str,
        device: Path | None,
        *,
        rate: str = "400 Gb/sec (4X NDR)",
        state: str = "4: ACTIVE",
        layer: str = "InfiniBand",
        ports: int = 1,
    ) -> None:
        """An RDMA device on the PCI device that `pci` returned; empty texts leave the file out."""
        parent = device if device is not None else Path("devices/virtual")
        folder = parent / "infiniband" / name
        for port in range(1, ports + 1):
            for file, text in (("rate", rate), ("state", state), ("link_layer", layer)):
                if text:
                    self.write(folder / "ports" / str(port) / file, text)
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        if device is not None:
            (self.root / folder / "device").symlink_to("../..")
        self.link(f"class/infiniband/{name}", folder)

    def net(self, name: str, device: Path, *, speed: str = "25000", state: str = "up") -> None:
        folder = device / "net" / name
        self.write(folder / "operstate", state)
        self.write(folder / "speed", speed)
        (self.root / folder / "device").symlink_to("../..")
        self.link(f"class/net/{name}", folder)


def full(address: str) -> str:
    return address if address.count(":") == 2 else f"0000:{address}"


def cpulist(mask: str) -> str:
    """hwloc writes CPU sets as 0x-words, highest first; an empty word is zero."""
    value = 0
    for word in mask.split(","):
        value = value << 32 | int(word or "0", 16)
    return ",".join(str(bit) for bit in range(value.bit_length()) if value >> bit & 1)


@dataclass(frozen=True, slots=True)
class _Above:
    """What stands over an object of the XML file."""

    cpuset: str
    nodeset: int
    root: str = ""
    bridges: tuple[str, ...] = field(default=())


def tree_from_hwloc(xml: Path, base: Path) -> Path:
    """The sysfs tree of a machine that lstopo captured. Ports are ACTIVE; EFA's have the rate of
    their kind, others none."""
    tree = HostTree(base)
    machine = ElementTree.parse(xml).getroot().find("object")
    assert machine is not None
    _walk(tree, machine, _Above(machine.get("cpuset", "0"), 0))
    return tree.root


def _walk(tree: HostTree, element: ElementTree.Element, above: _Above) -> None:
    kind = element.get("type", "")
    address = element.get("pci_busid", "")
    if element.get("cpuset") and kind != "NUMANode":
        nodeset = int(element.get("nodeset", "0x0").replace(",", "").replace("0x", "") or "0", 16)
        above = _Above(element.get("cpuset", ""), nodeset)
    if kind == "NUMANode":
        tree.node(int(element.get("os_index", "0")), cpulist(element.get("cpuset", "")))
    elif kind == "Bridge" and element.get("bridge_type") == "0-1":
        domain, bus = element.get("bridge_pci", "").split(":")
        above = _Above(above.cpuset, above.nodeset, f"pci{domain}:{bus[1:3]}")
    elif kind == "Bridge":
        bridges = (*above.bridges, address)
        above = _Above(above.cpuset, above.nodeset, above.root, bridges)
    elif kind == "PCIDev":
        _device(tree, element, above)
        return
    for child in element.findall("object"):
        _walk(tree, child, above)


def _device(tree: HostTree, element: ElementTree.Element, above: _Above) -> None:
    match = re.match(r"(\w{4}) \[(\w{4}):(\w{4})\]", element.get("pci_type", ""))
    assert match is not None
    # A device that hangs below the whole machine belongs to no node, as the kernel's -1 says.
    single = above.nodeset and above.nodeset & (above.nodeset - 1) == 0
    device = tree.pci(
        element.get("pci_busid", ""),
        (f"0x{match[1]}00", f"0x{match[2]}"),
        under=above.bridges,
        root=above.root,
        numa=above.nodeset.bit_length() - 1 if single else -1,
        cpulist=cpulist(above.cpuset),
        link=_LINK.get(round(float(element.get("pci_link_speed", "0")), 3)),
    )
    efa = {"efa0": 100, "efa1": 100, "efa2": 200, "efa3": 400}.get(match[3])
    for port in element.findall("object"):
        name = port.get("name", "")
        # Types of hwloc 2 are numbers, those of hwloc 3 bits: 3 and 48 OpenFabrics, 2 and 16 net.
        if port.get("osdev_type") in ("3", "48"):
            tree.rdma(name, device, rate=f"{efa} Gb/sec" if efa else "", layer="")
        elif port.get("osdev_type") in ("2", "16"):
            tree.net(name, device, speed="-1")


def tree_from_lspci(path: Path, base: Path) -> Path:
    """The sysfs tree of a compressed `lspci -vvv`. It names no RDMA devices: every Mellanox
    function becomes one, with the rate of its kind."""
    tree = HostTree(base)
    blocks = gzip.decompress(path.read_bytes()).decode().split("\n\n")
    above: dict[str, tuple[str, tuple[str, ...]]] = {}  # bus → (host bridge, bridges)
    for block in sorted(blocks, key=lambda text: text.strip()[:7]):
        head = re.match(r"(\w\w):(\w\w\.\w) ([^:]+): (.*)", block.strip())
        if head is None:
            continue
        address = full(f"{head[1]}:{head[2]}")
        root, bridges = above.get(head[1], (f"pci0000:{head[1]}", ()))
        node = re.search(r"NUMA node: (\d+)", block)
        speed = re.search(r"LnkCap:.*Speed ([\d.]+)GT/s, Width x(\d+)", block)
        below = re.search(r"Bus: primary=\w\w, secondary=(\w\w)", block)
        if below is not None:
            above[below[1]] = (root, (*bridges, address))
            continue
        kind = ("0x088000", "0x8086")
        if head[3] == "3D controller":
            kind = GPU
        elif "Mellanox" in head[4]:
            kind = ("0x020000", "0x15b3")
        device = tree.pci(
            address, kind, under=bridges, root=root, numa=int(node[1]) if node else -1,
            link=(speed[1], int(speed[2])) if speed else None,
        )  # fmt: skip
        if "ConnectX" in head[4]:
            seven = "ConnectX-7" in head[4]
            rate = "400 Gb/sec (4X NDR)" if seven else "100 Gb/sec (4X EDR)"
            layer = "InfiniBand" if seven else "Ethernet"
            tree.rdma(address, device, rate=rate, layer=layer)
    return tree.root
