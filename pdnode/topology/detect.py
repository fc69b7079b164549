"""Finds GPUs and NICs in a sysfs tree and matches them by PCI address, never by index or name."""

import re
from pathlib import Path

from pdnode.topology.cpus import read_cores, read_nodes, read_online
from pdnode.topology.drivers import driver_gpus, proc_gpus
from pdnode.topology.host import Gpu, Host, Nic, Place, nic_order
from pdnode.topology.pci import (
    AMAZON,
    DEVICES,
    Locator,
    PciDevice,
    is_gpu,
    normal_address,
    pci_of,
    read_devices,
    read_link_gbps,
)
from pdnode.topology.sysfs import LIVE, Sysfs

INFINIBAND = ("class", "infiniband")
NET = ("class", "net")
MAX_GPUS = 256
MAX_NICS = 1024
_GBPS = re.compile(r"(\d{1,6}(?:\.\d{1,4})?) Gb/sec")


def detect(root: Path = LIVE) -> Host:
    """The host whose /sys is `root`. Whatever cannot be read is unknown; nothing is raised."""
    sysfs = Sysfs(root)
    nodes = read_nodes(sysfs)
    online = read_online(sysfs, nodes)
    devices = read_devices(sysfs)
    locator = Locator(sysfs, nodes, online)
    drivers = proc_gpus(sysfs)
    if sysfs.live and not drivers:  # the library takes a second or more to start: last
        drivers = driver_gpus()
    gpus = _gpus(devices, locator, drivers)
    nics = _rdma_nics(sysfs, devices, locator)
    nics += _net_nics(sysfs, devices, locator, taken=_functions(nics))
    problems = list(dict.fromkeys(locator.problems))
    if not devices:
        problems.append(f"{root} shows no PCI device")
    for what, found, most in (("GPUs", gpus, MAX_GPUS), ("NICs", nics, MAX_NICS)):
        if len(found) > most:
            problems.append(f"{len(found)} {what}: only the first {most} are looked at")
    cores = read_cores(sysfs, online, nodes)
    nics.sort(key=nic_order)
    return Host(nodes, cores, tuple(gpus[:MAX_GPUS]), tuple(nics[:MAX_NICS]), tuple(problems))


def _gpus(devices: dict[str, PciDevice], locator: Locator, drivers: dict[str, str]) -> list[Gpu]:
    """By class and vendor, or because the driver has it; one that only the driver knows of has no
    place on the PCI bus."""
    found = {a for a, device in devices.items() if is_gpu(device.class_code, device.vendor)}
    gpus = []
    for address in sorted(found | set(drivers)):
        device = devices.get(address)
        if device is None:
            locator.problems.append(f"GPU {address}: the driver has it, sysfs does not show it")
            device = PciDevice(address, 0, None, "", ())
        gpus.append(Gpu(locator.place(device), drivers.get(address, "")))
    return gpus


def _functions(nics: list[Nic]) -> set[str]:
    return {nic.place.pci for nic in nics if nic.place.pci is not None}


def _place(
    sysfs: Sysfs, devices: dict[str, PciDevice], locator: Locator, entry: tuple[str, ...]
) -> tuple[PciDevice | None, Place]:
    """Where the device behind a class entry sits: by its `device` link, else by its own link."""
    address = pci_of(sysfs.link(*entry, "device")[-1:]) or pci_of(sysfs.link(*entry))
    device = devices.get(address) if address is not None else None
    return device, locator.unplaced() if device is None else locator.place(device)


def _rdma_nics(sysfs: Sysfs, devices: dict[str, PciDevice], locator: Locator) -> list[Nic]:
    """RDMA devices without the software ones (rxe, siw, scif)."""
    nics = []
    for name in sysfs.names(*INFINIBAND):
        entry = (*INFINIBAND, name)
        ports = [_port(sysfs, *entry, "ports", port) for port in sysfs.names(*entry, "ports")]
        device, place = _place(sysfs, devices, locator, entry)
        if device is None and (sysfs.link(*entry) or not ports):
            continue  # the kernel shows where it sits, and that is not on a PCI bus
        state, rate, layer = max(
            ports,
            key=lambda port: (port[0] == "ACTIVE", port[0] == "", port[1] or 0.0),
            default=("", None, ""),
        )
        nics.append(
            Nic(
                name=name,
                place=place,
                provider=_provider(sysfs, entry, device),
                rate_gbps=rate,
                link_gbps=read_link_gbps(sysfs, device) if device is not None else None,
                state=state,
                link_layer=layer,
                parent=_physical(sysfs, device),
                interfaces=tuple(sysfs.names(*entry, "device", "net")),
            )
        )
    return nics


def _port(sysfs: Sysfs, *port: str) -> tuple[str, float | None, str]:
    """(state, Gb/s, link layer), each empty or None if unknown. A device counts as its best port:
    one connection uses one."""
    state = (sysfs.text(*port, "state") or "").rpartition(":")[2].strip()
    if not state and "LinkUp" in (sysfs.text(*port, "phys_state") or ""):
        state = "ACTIVE"
    match = _GBPS.match(sysfs.text(*port, "rate") or "")
    layer = sysfs.text(*port, "link_layer") or ""
    known = layer if layer in ("InfiniBand", "Ethernet") else ""
    return state, float(match[1]) or None if match else None, known


def _provider(sysfs: Sysfs, entry: tuple[str, ...], device: PciDevice | None) -> str:
    """libfabric's provider: the kernel driver says it, else the maker."""
    driver = sysfs.link(*entry, "device", "driver")[-1:]
    if driver:
        return "efa" if driver == ("efa",) else "verbs"
    return "efa" if device is not None and device.vendor == AMAZON else "verbs"


def _physical(sysfs: Sysfs, device: PciDevice | None) -> str | None:
    if device is None:
        return None
    return pci_of(sysfs.link(*DEVICES, device.address, "physfn")[-1:])


def _net_nics(
    sysfs: Sysfs, devices: dict[str, PciDevice], locator: Locator, taken: set[str]
) -> list[Nic]:
    """Network interfaces that are hardware and not the Ethernet or IPoIB side of an RDMA device."""
    nics = []
    for name in sysfs.names(*NET):
        entry = (*NET, name)
        if not sysfs.exists(*entry, "device"):
            continue
        device, place = _place(sysfs, devices, locator, entry)
        if device is not None and device.address in taken:
            continue
        operstate = sysfs.text(*entry, "operstate") or ""
        speed_mbps = sysfs.integer(*entry, "speed") or 0
        nics.append(
            Nic(
                name=name,
                place=place,
                provider="tcp",
                rate_gbps=speed_mbps / 1000 if speed_mbps > 0 else None,
                link_gbps=read_link_gbps(sysfs, device) if device is not None else None,
                state={"up": "ACTIVE", "unknown": ""}.get(operstate, operstate.upper()),
                link_layer="Ethernet",
                parent=_physical(sysfs, device),
                interfaces=(name,),
            )
        )
    return nics


def find_nic(host: Host, name: str) -> Nic | None:
    """The NIC of this device name, PCI address or network interface."""
    address = normal_address(name)
    for nic in host.nics:
        if name == nic.name or name in nic.interfaces or (address and address == nic.place.pci):
            return nic
    return None
