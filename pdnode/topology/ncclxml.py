"""Topology files in the form of NCCL (NCCL_TOPO_FILE), as clouds ship them where the guest's sysfs
shows no common bridge. Read alone they make a host; over a sysfs tree they say where devices sit.
"""

import dataclasses
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from pdnode.errors import ConfigError, Problem
from pdnode.topology.cpus import NO_CPUS, CpuSet, NumaNode, guess_cores, parse_cpumask
from pdnode.topology.host import UNKNOWN_NODE, Gpu, Host, Nic, Place, nic_order
from pdnode.topology.pci import AMAZON, is_gpu, is_nic, link_gbps, normal_address

MAX_BYTES = 4 << 20
MAX_DEPTH = 64


def read_topology_file(path: Path) -> Host:
    """The host that the file describes. ConfigError if it cannot be read or is of another kind."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _bad(path, f"larger than {MAX_BYTES} bytes")
        system = ElementTree.parse(path).getroot()
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from error
    except (ElementTree.ParseError, ValueError) as error:
        raise _bad(path, f"no XML: {error}") from error
    if system.tag != "system":
        raise _bad(path, f"expected <system> as NCCL writes it, got <{system.tag}>")
    reader = _Reader(path)
    for number, cpu in enumerate(system.iter("cpu")):
        reader.cpu(cpu, number)
    return reader.host()


def _bad(path: Path, text: str) -> ConfigError:
    return ConfigError([Problem("topology file", f"{path}: {text}", device=False)])


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._nodes: dict[int, CpuSet] = {}
        self._gpus: list[Gpu] = []
        self._nics: list[Nic] = []

    def host(self) -> Host:
        nodes = tuple(NumaNode(number, cpus) for number, cpus in sorted(self._nodes.items()))
        gpus = sorted(self._gpus, key=lambda gpu: gpu.place.pci or "")
        nics = sorted(self._nics, key=nic_order)
        cores = guess_cores(frozenset().union(*self._nodes.values()), nodes)
        return Host(nodes, cores, tuple(gpus), tuple(nics))

    def cpu(self, cpu: ElementTree.Element, number: int) -> None:
        numa = self._integer(cpu, "numaid", UNKNOWN_NODE)
        try:
            cpus = parse_cpumask(cpu.get("affinity") or "0")
        except ValueError as error:
            raise _bad(self._path, f"affinity of cpu {numa}: {error}") from error
        if numa != UNKNOWN_NODE:
            self._nodes[numa] = self._nodes.get(numa, NO_CPUS) | cpus
        place = Place(None, f"cpu{number}", (), numa, numa, cpus)
        self._children(cpu, place)

    def _children(self, element: ElementTree.Element, place: Place) -> None:
        if len(place.bridges) > MAX_DEPTH:
            raise _bad(self._path, f"deeper than {MAX_DEPTH} bridges")
        for child in element:
            if child.tag == "pci":
                self._pci(child, place)
            elif child.tag == "nic":
                self._nets(child, place, None)

    def _pci(self, element: ElementTree.Element, place: Place) -> None:
        address = normal_address(element.get("busid", ""))
        if address is None:
            raise _bad(self._path, f'busid="{element.get("busid")}" is no PCI address')
        here = dataclasses.replace(place, pci=address)
        code = self._integer(element, "class", 0)
        vendor = self._integer(element, "vendor", 0) or None
        if is_gpu(code, vendor) or element.find("gpu") is not None:
            self._gpus.append(Gpu(here))
        elif is_nic(code) or element.find("nic") is not None:
            self._nets(element, here, vendor)
        else:
            below = dataclasses.replace(place, bridges=(*place.bridges, address))
            self._children(element, below)

    def _nets(self, element: ElementTree.Element, place: Place, vendor: int | None) -> None:
        """NICs of one PCI function, or of none; a function without a name goes by its address."""
        provider = "tcp" if place.pci is None else "efa" if vendor == AMAZON else "verbs"
        link = link_gbps(element.get("link_speed"), element.get("link_width"))
        nets = list(element.iter("net")) or [ElementTree.Element("net")]
        for net in nets:
            name = net.get("name") or place.pci
            if name is None or any(name == nic.name for nic in self._nics):
                continue
            rate = self._integer(net, "speed", 0) / 1000
            self._nics.append(Nic(name, place, provider, rate or None, link))

    def _integer(self, element: ElementTree.Element, name: str, default: int) -> int:
        text = element.get(name) or ""
        try:
            return int(text, 0) if text else default
        except ValueError:
            raise _bad(self._path, f'{element.tag} {name}="{text}" is no number') from None


def override(host: Host, file: Host) -> Host:
    """`host` with the places of `file`. A file whose devices are others than this machine's is not
    believed at all; devices it does not name stay where sysfs has them."""
    wrong = list(_contradictions(host, file))
    if wrong:
        text = "the topology file does not describe this machine and is not used: "
        return dataclasses.replace(host, problems=(*host.problems, text + "; ".join(wrong)))
    problems = [*host.problems, *_absent(host, file)]
    by_name = {nic.name: nic.place for nic in file.nics if nic.place.pci is None}
    by_pci = {gpu.place.pci: gpu.place for gpu in file.gpus}
    by_pci |= {nic.place.pci: nic.place for nic in file.nics}

    def moved(place: Place, name: str = "") -> Place:
        given = by_pci.get(place.pci) if place.pci is not None else None
        given = given or by_name.get(name)
        if given is None:
            return place
        if place.numa not in (given.numa, UNKNOWN_NODE):
            problems.append(
                f"{place.pci or name}: node {given.numa} in the topology file, "
                f"{place.numa} in sysfs; the file is believed"
            )
        cpus = next((n.cpus for n in host.nodes if n.number == given.numa and n.cpus), given.cpus)
        return dataclasses.replace(given, pci=place.pci, cpus=cpus)

    gpus = tuple(dataclasses.replace(gpu, place=moved(gpu.place)) for gpu in host.gpus)
    nics = tuple(dataclasses.replace(nic, place=moved(nic.place, nic.name)) for nic in host.nics)
    return dataclasses.replace(host, gpus=gpus, nics=nics, problems=tuple(problems))


def _addresses(devices: tuple[Gpu, ...] | tuple[Nic, ...]) -> set[str]:
    return {device.place.pci for device in devices if device.place.pci is not None}


def _contradictions(host: Host, file: Host) -> Iterator[str]:
    """Devices of another kind or at another address than the file says; at most a few of them."""
    gpus, nics = _addresses(host.gpus), _addresses(host.nics)
    found = [f"{a} is a NIC here, a GPU in the file" for a in sorted(_addresses(file.gpus) & nics)]
    found += [f"{a} is a GPU here, a NIC in the file" for a in sorted(_addresses(file.nics) & gpus)]
    places = {nic.name: nic.place.pci for nic in host.nics}
    for nic in file.nics:
        here = places.get(nic.name)
        if here is not None and nic.place.pci is not None and here != nic.place.pci:
            found.append(f"{nic.name} is at {here}, not at {nic.place.pci}")
    if file.gpus and gpus and not _addresses(file.gpus) & gpus:
        found.append("none of its GPUs is here")
    yield from found[:4]
    if len(found) > 4:
        yield f"and {len(found) - 4} more"


def _absent(host: Host, file: Host) -> Iterator[str]:
    here = _addresses(host.gpus) | _addresses(host.nics)
    names = {nic.name for nic in host.nics}
    for gpu in file.gpus:
        if gpu.place.pci not in here:
            yield f"GPU {gpu.place.pci} of the topology file is not on this machine"
    for nic in file.nics:
        if nic.place.pci not in here and nic.name not in names:
            yield f"NIC {nic.name} of the topology file is not on this machine"
