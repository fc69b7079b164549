"""The host as the snapshot shows it, and what its hardware counted on the node's NICs."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from pdnode.config import Config
from pdnode.obs import snapshot as form
from pdnode.topology.counters import NicCounters, Traffic
from pdnode.topology.cpus import format_cpulist
from pdnode.topology.detect import INFINIBAND, NET, detect, find_nic
from pdnode.topology.host import UNKNOWN_NODE, Host, Nic, Place
from pdnode.topology.ncclxml import override, read_topology_file
from pdnode.topology.place import Placement, place
from pdnode.topology.sysfs import Sysfs
from pdnode.topology.usable import Policy

LOOPBACK = "lo"
"""Its counters have everything that is local to the host, twice: not what a NIC carried."""

ERROR_KINDS = ("retransmits", "drops", "errors", "congestion", "link_downs")
_NOWHERE = Place(None, "", (), UNKNOWN_NODE, UNKNOWN_NODE)


@dataclass(frozen=True, slots=True)
class NicReading:
    """`state`: up | down, "" where the kernel does not say."""

    traffic: Traffic
    state: str


class HostView:
    """Built once (reads /sys for some milliseconds); `read` blocks as well: not on the loop."""

    def __init__(self, config: Config, *, root: Path | None = None) -> None:
        self._sysfs = Sysfs() if root is None else Sysfs(root)
        host = detect(self._sysfs.root)
        if config.topology.file:
            host = override(host, read_topology_file(Path(config.topology.file)))
        wanted = config.topology
        placement = place(host, Policy(wanted.allow, wanted.deny, config.fabric.provider))
        self._nics = {
            nic.name: _nic(host, nic.name, config.fabric.provider)
            for nic in config.fabric.nics
            if nic.name != LOOPBACK
        }
        self._counters = NicCounters(list(self._nics.values()), sysfs=self._sysfs)
        self.topology = _topology(host, placement, self._nics)

    def numa(self, name: str) -> int | None:
        """NUMA node of one of the node's NICs."""
        nic = self._nics.get(name)
        known = nic is not None and nic.place.numa != UNKNOWN_NODE
        return nic.place.numa if nic is not None and known else None

    def read(self) -> dict[str, NicReading]:
        """By the name in the configuration; NICs without counters have None everywhere."""
        return {
            name: NicReading(self._counters.read(nic.name), self._state(nic))
            for name, nic in self._nics.items()
        }

    def _state(self, nic: Nic) -> str:
        if nic.provider == "tcp":
            text = self._sysfs.text(*NET, nic.name, "operstate") or ""
            return {"up": "up", "down": "down", "lowerlayerdown": "down"}.get(text, "")
        ports = (*INFINIBAND, nic.name, "ports")
        states = [self._sysfs.text(*ports, p, "state") or "" for p in self._sysfs.names(*ports)]
        if any("ACTIVE" in state for state in states):
            return "up"
        return "down" if any(states) else ""


def _nic(host: Host, name: str, provider: str) -> Nic:
    """For tcp the interface itself is looked at, also where it belongs to an RDMA device."""
    found = find_nic(host, name) or Nic(name, _NOWHERE, "tcp")
    tcp = provider.startswith("tcp")
    return dataclasses.replace(found, name=name, provider="tcp") if tcp else found


def _topology(host: Host, placement: Placement, nics: dict[str, Nic]) -> form.Topology:
    reasons = {verdict.nic.name: verdict.reason for verdict in placement.nics}
    return form.Topology(
        numa=tuple(
            form.Numa(
                index=node.number,
                cpus=format_cpulist(node.cpus) or None,
                nics=tuple(n.name for n in host.nics if n.place.home == node.number),
            )
            for node in host.nodes
        ),
        gpus=tuple(
            form.Gpu(
                index=index,
                name=at.gpu.model or None,
                numa=None if at.gpu.place.home == UNKNOWN_NODE else at.gpu.place.home,
                rails=tuple(
                    form.Rail(nic=rail.nic.name, distance=rail.distance.name, why=rail.reason)
                    for rail in at.rails
                    if rail.assigned
                ),
            )
            for index, at in enumerate(placement.gpus)
        ),
        rails=tuple(
            form.Rail(nic=name, why=reasons.get(nic.name, "named in the configuration"))
            for name, nic in nics.items()
        )
        if not placement.gpus
        else (),
    )
