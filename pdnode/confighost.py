"""What a configuration needs of the host: addresses of its NICs, free ports, libfabric, memlock.

Imports no torch and opens no device; everything that is looked at is let go again at once.
"""

import contextlib
import dataclasses
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from pdnode.config import Config, NicConfig
from pdnode.configchoice import choose_nics, chooses, with_chosen_nics
from pdnode.configdevice import with_device
from pdnode.configgpu import gpu_problems
from pdnode.configkinds import HostPort
from pdnode.confignics import entries_problem, memlock_problem, nic_problems, nic_warnings
from pdnode.configparse import complete_nic
from pdnode.configrules import NIC_RULES, broken, listeners
from pdnode.errors import ConfigError, DeviceMissing, Problem
from pdnode.fabric.library import find_library
from pdnode.topology.detect import detect
from pdnode.topology.ncclxml import override, read_topology_file
from pdnode.topology.sysfs import Sysfs
from pdnode.types import RegionKind, Role

_RDMA_DEVICES = Path("/sys/class/infiniband")


def _interfaces_of(name: str) -> list[str]:
    """Network interfaces behind `name`: itself, or those of the RDMA device of this name."""
    behind = _RDMA_DEVICES / name / "device" / "net"
    return sorted(entry.name for entry in behind.iterdir()) if behind.is_dir() else [name]


def _first_address(name: str) -> str | None:
    """First IPv4 address of the interface, else its first global IPv6 one."""
    known = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for interface in _interfaces_of(name):
            for address in known.get(interface, []):
                if address.family == family and "%" not in address.address:
                    return str(address.address)
    return None


def _unresolved(config: Config) -> Iterator[tuple[int, NicConfig]]:
    """NICs whose address must be looked up; efa is opened by device name and needs none."""
    if config.fabric.provider != "efa":
        yield from ((i, nic) for i, nic in enumerate(config.fabric.nics) if not nic.address)


def resolve_host(config: Config) -> Config:
    """`config` with all that it leaves to this host. Raises as `with_device` and `resolve_nics`."""
    return resolve_nics(with_device(config))


def resolve_nics(config: Config) -> Config:
    """`config` with an address for every NIC; where it names none, with those of this host.

    Raises DeviceMissing where a NIC is not on this host or has no address, ConfigError where the
    addresses found break a rule (loopback advertised to other hosts, a NIC listed twice).
    """
    config = with_chosen_nics(config, _first_address)
    nics = list(config.fabric.nics)
    missing = []
    for index, nic in _unresolved(config):
        address = _first_address(nic.name)
        if address is None:
            missing.append(str(_no_address(index, nic)))
        else:
            nics[index] = complete_nic(dataclasses.replace(nic, address=address), config.node.role)
    if missing:
        raise DeviceMissing("\n".join(missing))
    fabric = dataclasses.replace(config.fabric, nics=tuple(nics))
    resolved = dataclasses.replace(config, fabric=fabric)
    problems = broken(resolved, NIC_RULES, frozenset())
    if problems:
        raise ConfigError(problems)
    return resolved


def _no_address(index: int, nic: NicConfig) -> Problem:
    known = ", ".join(sorted(psutil.net_if_addrs()))
    text = f'no address found for "{nic.name}"; interfaces of this host: {known}'
    return Problem(f"fabric.nics[{index}].name", text, device=True)


def _port_problem(where: str, address: HostPort) -> Problem | None:
    """Bind as the daemon will, and let go. A port that is only in TIME_WAIT counts as free."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return Problem(where, f'"{address.host}" cannot be resolved: {error.strerror}')
    for family, kind, protocol, _, target in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(target)
                probe.listen(1)
            except OSError as error:
                return Problem(where, _bind_text(address, error))
    return None


def _bind_text(address: HostPort, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {address.port} on {address.host} is taken"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address.host} is no address of this host"
    return f"{address.host}:{address.port} cannot be bound: {error.strerror}"


def peer_listen_problem(config: Config) -> Problem | None:
    """Whether a prefill node could listen for links now."""
    return _port_problem("peer.listen", HostPort(config.peer.host, config.peer.port))


def _fabric_problem(config: Config) -> Problem | None:
    """Load libfabric and ask it for the provider, without opening a NIC."""
    fabric = config.fabric
    if config.node.role is Role.COLOCATED:
        return None
    try:
        library = find_library(fabric.library, fabric.provider)
    except DeviceMissing as error:
        text = str(error).removeprefix("[fabric] library: ")
        return Problem("fabric.library", text, device=True)
    try:
        from pdnode.fabric._native import Fabric, FabricError
    except ImportError as error:
        return Problem("", f"the compiled transfer core cannot be loaded: {error}", device=True)
    try:
        device_memory = config.kv.region == RegionKind.CUMEM
        Fabric(str(library), fabric.provider, fabric.poll, device_memory=device_memory).close()
    except FabricError as error:
        return Problem("fabric.provider", str(error), device=True)
    return None


def _admin_problem(config: Config) -> Problem | None:
    directory = config.node.admin_socket.parent
    if directory.is_dir() and os.access(directory, os.W_OK | os.X_OK):
        return None
    state = "cannot be written to" if directory.is_dir() else "is not a directory"
    return Problem("node.admin_socket", f"{directory} {state}; make it, or name another path")


def _missing(error: DeviceMissing) -> Problem:
    where, _, text = str(error).partition(": ")
    return Problem(where, text, device=True)


def check_host(config: Config) -> list[Problem]:
    """Everything that this host lacks for `config`: all of it, not the first."""
    problems = [
        _no_address(index, nic)
        for index, nic in _unresolved(config)
        if _first_address(nic.name) is None
    ]
    try:
        config = with_device(config)
    except ConfigError as error:
        problems += error.problems
    except DeviceMissing as error:
        problems.append(_missing(error))
        engine = dataclasses.replace(config.engine, device="cpu")  # said once is enough
        config = dataclasses.replace(config, engine=engine)
    if not problems:
        try:
            config = resolve_nics(config)
        except ConfigError as error:
            problems += error.problems
        except DeviceMissing as error:
            problems.append(_missing(error))
    wanted = [(listener.where, listener.address) for listener in listeners(config)]
    for index, nic in enumerate(config.fabric.nics):
        if nic.address:
            wanted.append((f"fabric.nics[{index}].address", HostPort(nic.address, 0)))
    found = [_port_problem(where, address) for where, address in wanted]
    found += [_admin_problem(config), memlock_problem(config), _fabric_problem(config)]
    found.append(entries_problem(config, Sysfs()))
    problems += [problem for problem in found if problem is not None]
    if not any(problem.where == "engine.device" for problem in problems):
        problems += gpu_problems(config)
    return problems + list(nic_problems(config, detect(), Sysfs())) + _topology_problems(config)


def _topology_problems(config: Config) -> list[Problem]:
    if config.topology.file:
        try:
            read_topology_file(Path(config.topology.file))
        except ConfigError as error:
            return [dataclasses.replace(p, where="topology.file") for p in error.problems]
    return []


def host_warnings(config: Config) -> list[Problem]:
    """What works but costs speed, and what is odd about the host; nothing of it stops a node."""
    with contextlib.suppress(DeviceMissing, ConfigError):  # check_host says it
        config = with_chosen_nics(with_device(config), _first_address)
    host = detect()
    if config.topology.file and not _topology_problems(config):
        host = override(host, read_topology_file(Path(config.topology.file)))
    odd = [Problem("topology", text) for text in host.problems]
    return odd + list(nic_warnings(config, host, Sysfs()))


def nic_notes(config: Config) -> list[tuple[str, str]]:
    """(NIC, why) of those that the node will take, where the configuration leaves it to the host;
    and, of the others, why not."""
    if not chooses(config):
        return []
    with contextlib.suppress(DeviceMissing, ConfigError):  # check_host says it
        config = with_device(config)
    try:
        choice = choose_nics(config, _first_address)
    except ConfigError:
        return []
    return [(one.nic.name, f"taken: {one.reason}") for one in choice.chosen] + [
        (one.nic.name, f"not taken: {one.reason}") for one in choice.refused
    ]
