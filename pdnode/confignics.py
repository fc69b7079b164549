"""What `check-config --host` says of the NICs that a configuration names, without opening them."""

import resource
from collections.abc import Iterator

from pdnode.config import Config
from pdnode.configkinds import format_size
from pdnode.errors import Problem
from pdnode.topology.detect import INFINIBAND, NET, find_nic
from pdnode.topology.host import Host, Nic
from pdnode.topology.sysfs import Sysfs
from pdnode.topology.usable import matches
from pdnode.types import RegionKind, Role

PINNING_PROVIDERS = ("verbs", "efa")
EFA_ENTRIES = 24_000_000  # as the transfer core counts them (provider.cpp)
DEVICE_PAGE_BYTES = 64 << 10  # the smallest that CUDA hands out (memory.cpp)
ROCE_MTU = 4200
"""Of the interface: RoCE sends 4096 bytes a packet where they fit with its headers, else fewer."""

_MAX_GIDS = 256


def _named(config: Config, host: Host) -> Iterator[tuple[str, str, Nic | None]]:
    """(place in the configuration, name, what it is) of every NIC. One that is named by its address
    is left out: libfabric finds its device, or says that there is none."""
    for index, nic in enumerate(config.fabric.nics):
        if nic.name != nic.address:
            yield f"fabric.nics[{index}].name", nic.name, find_nic(host, nic.name)


def nic_problems(config: Config, host: Host, sysfs: Sysfs) -> Iterator[Problem]:
    """NICs that cannot work as they are: absent, down, without a device node or a GID."""
    for where, name, nic in _named(config, host):
        if nic is not None and matches(nic, config.topology.deny):
            yield Problem(where, f"{name} is denied by topology.deny")
        if config.fabric.provider not in PINNING_PROVIDERS:
            if nic is not None and nic.provider == "tcp" and nic.state == "DOWN":
                yield Problem(where, f"interface {name} is down", device=True)
            continue
        if nic is None or nic.provider == "tcp":
            known = ", ".join(n.name for n in host.nics if n.provider != "tcp") or "none"
            text = f'"{name}" is no RDMA device of this host; it has: {known}'
            yield Problem(where, text, device=True)
            continue
        if nic.provider != config.fabric.provider:
            text = f"{name} is driven by {nic.provider}, not by {config.fabric.provider}"
            yield Problem(where, text, device=True)
        if nic.state not in ("", "ACTIVE"):
            yield Problem(where, f"the port of {name} is {nic.state}", device=True)
        if sysfs.live and not _has_device_node(sysfs, nic.name):
            yield Problem(where, f"no /dev/infiniband/uverbs* that may be opened for {name}", True)
        if (
            nic.link_layer == "Ethernet"
            and nic.provider == "verbs"
            and not _has_roce_v2(sysfs, nic)
        ):
            yield Problem(where, f"{name} has no RoCE v2 GID: give its interface an address", True)


def _has_device_node(sysfs: Sysfs, name: str) -> bool:
    for entry in sysfs.names("class", "infiniband_verbs"):
        if sysfs.text("class", "infiniband_verbs", entry, "ibdev") == name:
            try:
                with open(f"/dev/infiniband/{entry}", "r+b", buffering=0):
                    return True
            except OSError:
                return False
    return False


def _has_roce_v2(sysfs: Sysfs, nic: Nic) -> bool:
    """Whether a port has a RoCE v2 GID that is not zero; also where the kernel shows no types."""
    for port in sysfs.names(*INFINIBAND, nic.name, "ports"):
        base = (*INFINIBAND, nic.name, "ports", port)
        types = sysfs.names(*base, "gid_attrs", "types")[:_MAX_GIDS]
        if not types:
            return True
        for index in types:
            gid = (sysfs.text(*base, "gids", index) or "").replace(":", "").strip("0")
            if gid and sysfs.text(*base, "gid_attrs", "types", index) == "RoCE v2":
                return True
    return False


def nic_warnings(config: Config, host: Host, sysfs: Sysfs) -> Iterator[Problem]:
    """What makes NICs slow: a small MTU, unequal rates, a narrow slot, no huge pages."""
    rates = {}
    for where, name, nic in _named(config, host):
        if nic is None:
            continue
        rates[name] = nic.effective_gbps
        if nic.rate_gbps and nic.effective_gbps < nic.rate_gbps:
            yield Problem(
                where,
                f"the PCIe slot of {name} carries {nic.effective_gbps:.4g} Gb/s, "
                f"its port {nic.rate_gbps:.4g}",
            )
        if nic.provider != "verbs" or nic.link_layer != "Ethernet":
            continue
        for interface in nic.interfaces:
            mtu = sysfs.integer(*NET, interface, "mtu")
            if mtu is not None and mtu < ROCE_MTU:
                text = f"MTU of {interface} is {mtu}; RoCE wants {ROCE_MTU} or more on every hop"
                yield Problem(where, text)
    known = {name: rate for name, rate in rates.items() if rate}
    if known and min(known.values()) < max(known.values()):
        text = ", ".join(f"{name} {rate:.4g} Gb/s" for name, rate in known.items())
        yield Problem("fabric.nics", f"NICs of unequal rates share the work: {text}")
    if config.fabric.provider in PINNING_PROVIDERS and not _huge_pages(sysfs):
        yield Problem(
            "kv.pool_bytes", "no huge pages are reserved; a NIC then needs an entry for every 4 KiB"
        )


def _huge_pages(sysfs: Sysfs) -> int:
    base = ("kernel", "mm", "hugepages")
    return sum(sysfs.integer(*base, size, "nr_hugepages") or 0 for size in sysfs.names(*base))


def memlock_problem(config: Config) -> Problem | None:
    """Registering host memory with an RDMA NIC pins it, which RLIMIT_MEMLOCK bounds: the pools for
    every NIC, and for every registration of `_registrations`. A NIC has the memory of its own
    device group and, at worst, when the other groups have lost their NICs, of all. Memory of a GPU
    that is registered by dma-buf is not locked."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if config.fabric.provider not in PINNING_PROVIDERS or limit == resource.RLIM_INFINITY:
        return None
    if config.kv.region == RegionKind.CUMEM:
        return None
    peers = _registrations(config)
    nics = max(1, len(config.fabric.nics))
    dp = config.engine.dp
    need = config.kv.pool_bytes * dp * nics * peers
    if need and limit >= need:
        return None
    wanted = "unlimited (kv.pool_bytes is auto)"
    if need:
        factors = [f"{dp} groups"] * (dp > 1)
        factors += [f"{nics} NICs"] * (nics > 1) + [f"{peers} peers"] * (peers > 1)
        parts = " × ".join([format_size(config.kv.pool_bytes), *factors])
        wanted = f"{format_size(need)} ({parts})" if factors else parts
        if len({nic.group for nic in config.fabric.nics}) > 1:
            wanted += " at worst, when NICs carry the memory of other device groups,"
    return Problem(
        "fabric.provider",
        f"locked memory is limited to {format_size(limit)}, {wanted} is needed; raise it with "
        "LimitMEMLOCK= or ulimit -l",
        device=True,
    )


def _registrations(config: Config) -> int:
    """How often a NIC has the pools: on efa, where a fence drops a peer's registrations, once for
    every peer that writes."""
    if config.fabric.provider == "efa" and config.node.role is Role.DECODE:
        return max(1, len(config.prefill))
    return 1


def entries_problem(config: Config, sysfs: Sysfs) -> Problem | None:
    """An EFA device has a table entry for each page of registered memory, and so many in all."""
    if config.fabric.provider != "efa" or not config.kv.pool_bytes:
        return None
    page_bytes = 2 << 20 if _huge_pages(sysfs) else 4096
    if config.kv.region == RegionKind.CUMEM:
        page_bytes = DEVICE_PAGE_BYTES
    peers = _registrations(config)
    entries = -(-config.kv.pool_bytes * config.engine.dp // page_bytes) * peers
    if entries <= EFA_ENTRIES:
        return None
    return Problem(
        "kv.pool_bytes",
        f"{entries} pages of {page_bytes} bytes would be registered with each NIC ({peers} peers), "
        f"which has room for {EFA_ENTRIES}; use huge pages, a smaller pool or fewer peers",
        device=True,
    )
