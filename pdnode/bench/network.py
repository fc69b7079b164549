"""Two hosts with several NICs each: a network namespace, joined by veth pairs of a given rate.

One more pair carries the peer link. Addresses and names belong to this process alone.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Rail:
    """A veth pair: the end here and the one in the namespace."""

    here: str
    there: str
    address_here: str
    address_there: str
    netns: str

    def set(self, state: str) -> None:
        """The end of the namespace: here the carrier is lost."""
        ip("-n", self.netns, "link", "set", self.there, state)

    def limit(self, mbit: int) -> None:
        """Both directions, by a token bucket."""
        shape = f"rate {mbit}mbit burst {max(64, mbit)}k latency 20ms".split()
        run("tc", "qdisc", "replace", "dev", self.here, "root", "tbf", *shape)
        run("tc", "-n", self.netns, "qdisc", "replace", "dev", self.there, "root", "tbf", *shape)

    def received_bytes(self) -> int:
        """As the kernel counts them at the end here."""
        return int(Path(f"/sys/class/net/{self.here}/statistics/rx_bytes").read_text())


@dataclass(frozen=True, slots=True)
class Rails:
    netns: str
    link: Rail
    nics: tuple[Rail, ...]

    @property
    def nics_here(self) -> list[dict[str, object]]:
        """`[[fabric.nics]]` of a node on this side."""
        return [{"name": rail.here, "address": rail.address_here} for rail in self.nics]

    @property
    def nics_there(self) -> list[dict[str, object]]:
        return [{"name": rail.there, "address": rail.address_there} for rail in self.nics]


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)


def ip(*arguments: str) -> None:
    run("ip", *arguments)


@contextlib.contextmanager
def rails(count: int, *, mbit: int = 0) -> Iterator[Rails]:
    """`count` NICs on both sides, each of `mbit` Mbit/s; 0: as fast as they are."""
    number = os.getpid()
    netns = f"pdnode-r{number}"
    base = f"10.{64 + (number >> 8) % 64}.{number % 256}"
    ip("netns", "add", netns)
    found: list[Rail] = []
    try:
        ip("-n", netns, "link", "set", "lo", "up")
        for index in range(count + 1):
            found.append(_rail(netns, number, index, base))
        for rail in found[1:] if mbit else ():
            rail.limit(mbit)
        yield Rails(netns, found[0], tuple(found[1:]))
    finally:
        # The namespace takes them along in its own time, and the next rails have the same names.
        for rail in found:
            ip("link", "delete", rail.here)
        ip("netns", "delete", netns)


def _rail(netns: str, number: int, index: int, base: str) -> Rail:
    here, there = f"pr{number % 10**7}x{index}", f"pt{number % 10**7}x{index}"
    ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", netns)
    rail = Rail(here, there, f"{base}.{4 * index + 1}", f"{base}.{4 * index + 2}", netns)
    ip("address", "add", f"{rail.address_here}/30", "dev", here)
    ip("-n", netns, "address", "add", f"{rail.address_there}/30", "dev", there)
    ip("link", "set", here, "up")
    ip("-n", netns, "link", "set", there, "up")
    return rail
