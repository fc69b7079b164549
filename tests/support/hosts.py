"""Hosts as network namespaces, joined by two networks of their own: one for links, one for KV.

Nothing of it is in the namespace of the tests: two bridges stand in a namespace in the middle. A
cut takes the port of the bridge down, so a host sees no error, only that nothing comes.
"""

import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()

NETWORKS = ("link", "fabric")
_DEVICE = {"link": "eth0", "fabric": "kv0"}  # on every host

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"
)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20, capture_output=True)


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace. `cut` and `mend` name networks."""

    netns: str
    hub: str
    number: int
    _ports: dict[str, str] = field(default_factory=dict)

    def address(self, network: str) -> str:
        return f"10.{91 + NETWORKS.index(network)}.0.{self.number + 1}"

    @property
    def nic(self) -> dict[str, object]:
        """Its `[[fabric.nics]]` table."""
        return {"name": _DEVICE["fabric"], "address": self.address("fabric")}

    def cut(self, *networks: str) -> None:
        self._set(networks, "down")

    def mend(self, *networks: str) -> None:
        self._set(networks, "up")

    def _set(self, networks: tuple[str, ...], state: str) -> None:
        for network in networks:
            ip("-n", self.hub, "link", "set", self._ports[network], state)

    def connector(self) -> Callable[..., socket.socket]:
        """For aiohttp: makes sockets that are in this namespace."""

        def make(info: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
            family, kind, protocol, _, _ = info
            with _inside(self.netns):
                return socket.socket(family, kind, protocol)

        return make


@contextlib.contextmanager
def _inside(netns: str) -> Iterator[None]:
    """This thread is in `netns`; sockets that it makes stay there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{netns}") as there:
        _enter(libc, there.fileno())
        try:
            yield
        finally:
            _enter(libc, home.fileno())


def _enter(libc: ctypes.CDLL, fd: int) -> None:
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[dict[str, Host]]:
    """A host of each name, all on the same two networks."""
    mark = f"pd{os.getpid()}-{next(_numbers)}"
    hub = f"{mark}-hub"
    with contextlib.ExitStack() as stack:
        _add(stack, hub)
        for network in NETWORKS:
            ip("-n", hub, "link", "add", f"br-{network}", "type", "bridge")
            ip("-n", hub, "link", "set", f"br-{network}", "up")
        made = {}
        for number, name in enumerate(names):
            host = made[name] = Host(f"{mark}-{name}", hub, number)
            _add(stack, host.netns)
            for network in NETWORKS:
                port = host._ports[network] = f"{network}{number}"
                device = _DEVICE[network]
                peer = ("peer", "name", device, "netns", host.netns)
                ip("-n", hub, "link", "add", port, "type", "veth", *peer)
                ip("-n", hub, "link", "set", port, "master", f"br-{network}", "up")
                address = f"{host.address(network)}/24"
                ip("-n", host.netns, "address", "add", address, "dev", device)
                ip("-n", host.netns, "link", "set", device, "up")
        yield made


def _add(stack: contextlib.ExitStack, netns: str) -> None:
    ip("netns", "add", netns)
    stack.callback(ip, "netns", "delete", netns)
    ip("-n", netns, "link", "set", "lo", "up")
