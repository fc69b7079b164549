"""All NICs of a device group at once: dead, cut off, before a set-up, with a crash beside."""

from typing import TYPE_CHECKING

from pdnode.types import Role
from tests.sim.faults import Fault, end_connections

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.process import Process

NOTICED = 0.7  # of the losses: the host sees that its NICs are dead
LONGEST_S = 9.0


def pick(cluster: "Cluster", role: Role | None = None) -> "tuple[Process, int] | None":
    """A node with several device groups, and one of them."""
    found = [
        process
        for process in cluster.processes.values()
        if process.started and process.core.groups > 1 and role in (None, process.spec.role)
    ]
    if not found:
        return None
    process = cluster.rng.choice(found)
    return process, cluster.rng.randrange(process.core.groups)


def take_down(cluster: "Cluster", process: "Process", group: int, back_s: float) -> None:
    """Nothing passes the NICs of this group for so long."""
    ether, name = cluster.ether, process.spec.name
    noticed = cluster.rng.random() < NOTICED
    for nic in sorted(process.spec.devices.nics[group]):
        ether.nic_down.add((name, nic))
        cluster.kernel.at(back_s, ether.nic_back, name, nic)
        if noticed:
            end_connections(cluster, process, nic)


def _last(cluster: "Cluster") -> float:
    return cluster.rng.uniform(0.2, LONGEST_S)


def group_lost(cluster: "Cluster") -> bool:
    found = pick(cluster)
    if found is not None:
        take_down(cluster, *found, _last(cluster))
    return found is not None


def group_dies(cluster: "Cluster") -> bool:
    """All its connections end, and can be made again at once."""
    found = pick(cluster)
    if found is None:
        return False
    for nic in sorted(found[0].spec.devices.nics[found[1]]):
        end_connections(cluster, found[0], nic)
    return True


def one_nic_dies(cluster: "Cluster") -> bool:
    """One of several in a group, so that it returns while its mates carry memory."""
    found = [
        (process, nic)
        for process in cluster.processes.values()
        if process.started and process.core.groups > 1
        for nics in process.spec.devices.nics
        if len(nics) > 1
        for nic in sorted(nics)
    ]
    if found:
        end_connections(cluster, *cluster.rng.choice(found))
    return bool(found)


def groups_lost_on_both_sides(cluster: "Cluster") -> bool:
    found = [pick(cluster, role) for role in (Role.DECODE, Role.PREFILL)]
    if None in found:
        return False
    for one in found:
        assert one is not None
        take_down(cluster, *one, _last(cluster))
    return True


def group_lost_before_set_up(cluster: "Cluster") -> bool:
    """The links of the node are cut soon after, so that its next sessions begin without the NICs;
    or it is restarted, and finds them dead."""
    found = pick(cluster)
    if found is None:
        return False
    process, group = found
    take_down(cluster, process, group, _last(cluster))
    cluster.kernel.at(cluster.rng.uniform(0.0, 0.6), _cut, cluster, process)
    return True


def _cut(cluster: "Cluster", process: "Process") -> None:
    if cluster.rng.random() < 0.3:
        crash_if_up(cluster, process, 0.05)
        return
    for stream in cluster.streams:
        if not stream.broken and any(end in process.sockets for end in stream.ends):
            stream.cut((True, True))


def group_lost_and_crash(cluster: "Cluster") -> bool:
    """A group is lost while another node dies and comes back."""
    found = pick(cluster)
    others = [
        name for name, one in cluster.processes.items()
        if one.started and found is not None and one.spec.role is not found[0].spec.role
    ]  # fmt: skip
    if found is None or not others:
        return False
    take_down(cluster, *found, _last(cluster))
    name = cluster.rng.choice(others)
    process = cluster.processes[name]
    back_s = cluster.rng.choice((0.05, 0.5, 2.5))
    cluster.kernel.at(cluster.rng.uniform(0.0, 0.3), crash_if_up, cluster, process, back_s)
    return True


def crash_if_up(cluster: "Cluster", process: "Process", down_s: float) -> None:
    if cluster.processes.get(process.spec.name) is process:
        cluster.crash(process.spec.name, down_s)


DEVICE_FAULTS = (
    Fault("device group lost", group_lost),
    Fault("device group dies", group_dies),
    Fault("one NIC of a device group dies", one_nic_dies),
    Fault("device groups lost on both sides", groups_lost_on_both_sides),
    Fault("device group lost before set-up", group_lost_before_set_up),
    Fault("device group lost, node crashes", group_lost_and_crash),
)
CALM_DEVICE_FAULTS = (Fault("device group dies", group_dies),)
