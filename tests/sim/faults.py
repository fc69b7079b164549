"""What goes wrong. Each fault looks for a place where it can happen now, and says if it did."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pdnode.core.grant import GrantState
from pdnode.core.push import PushState
from pdnode.types import Role, TransferId
from tests.sim.network import Route
from tests.sim.wires import Connection

if TYPE_CHECKING:
    from pdnode.messenger.push_work import PushWork
    from tests.sim.cluster import Cluster
    from tests.sim.fabric import Core
    from tests.sim.process import Process

PATIENCE = 0.9  # how likely a fault waits for a rarer moment than there is now


class Fault(NamedTuple):
    name: str
    act: "Callable[[Cluster], bool]"


def _pick(cluster: "Cluster", role: Role | None = None) -> "Process | None":
    found = [
        process
        for process in cluster.processes.values()
        if process.started and role in (None, process.spec.role)
    ]
    return cluster.rng.choice(found) if found else None


def _pair(cluster: "Cluster") -> tuple[str, str]:
    decodes = [name for name, spec in cluster.specs.items() if spec.role is Role.DECODE]
    prefills = [name for name, spec in cluster.specs.items() if spec.role is Role.PREFILL]
    return cluster.rng.choice(decodes), cluster.rng.choice(prefills)


def _down(cluster: "Cluster", route: Route, longest_s: float = 6.0) -> None:
    route.down = True
    cluster.kernel.at(cluster.rng.uniform(0.05, longest_s), route.heal)


def link_cut(cluster: "Cluster") -> bool:
    found = [stream for stream in cluster.streams if not stream.broken]
    if found:
        told = cluster.rng.choice(((True, True), (True, False), (False, True), (False, False)))
        cluster.rng.choice(found).cut(told)
    return bool(found)


def link_partition(cluster: "Cluster") -> bool:
    _down(cluster, cluster.link_route(*_pair(cluster)))
    return True


def fabric_partition(cluster: "Cluster") -> bool:
    _down(cluster, cluster.fabric_route(*_pair(cluster)), 9.0)
    return True


def partition(cluster: "Cluster") -> bool:
    pair = _pair(cluster)
    _down(cluster, cluster.link_route(*pair))
    _down(cluster, cluster.fabric_route(*pair))
    return True


def crash(cluster: "Cluster") -> bool:
    process = _pick(cluster)
    if process is not None:
        cluster.crash(process.spec.name, cluster.rng.choice((0.0, 0.05, 0.5, 2.5)))
    return process is not None


def freeze(cluster: "Cluster") -> bool:
    process = _pick(cluster)
    if process is None or process.loop.frozen:
        return False
    process.freeze()
    cluster.kernel.at(cluster.rng.uniform(0.05, 5.0), process.thaw)
    return True


def slow(cluster: "Cluster") -> bool:
    process = _pick(cluster)
    if process is None:
        return False
    process.slow = cluster.rng.uniform(5.0, 200.0)
    cluster.kernel.at(cluster.rng.uniform(0.2, 3.0), setattr, process, "slow", 1.0)
    return True


def _busy(cluster: "Cluster") -> list[Connection]:
    return [
        connection
        for connection in cluster.ether.connections
        if connection.usable and connection.prefill.alive and not connection.prefill.frozen
        and any(not write.back for write in connection.writes)
    ]  # fmt: skip


def write_error(cluster: "Cluster") -> bool:
    """One write comes back with an error, and may land later."""
    found = _busy(cluster)
    if not found:
        return False
    odd = {(one.spec.name, work.session.session) for one, work in _odd(cluster)}
    last = [c for c in found if (c.prefill.node, c.prefill_session) in odd]
    if not last and cluster.rng.random() < PATIENCE:
        return False
    connection = cluster.rng.choice(last or found)
    write = cluster.rng.choice([write for write in connection.writes if not write.back])
    connection.prefill.back(write, error="a flush error")
    return True


def error_and_leave(cluster: "Cluster") -> bool:
    """A write fails on one of several connections while its client hangs up: words cross."""
    found = []
    for connection in _busy(cluster):
        session = connection.prefill.sessions.get(connection.prefill_session)
        if session is not None and len(session.connections) > 1:
            found.append(connection)
    if not found:
        return False
    connection = cluster.rng.choice(found)
    write = cluster.rng.choice([write for write in connection.writes if not write.back])
    process = cluster.processes[connection.prefill.node]
    assert process.pushes is not None
    work = process.pushes._by_transfer[TransferId(write.transfer.number)]
    client = cluster.clients[int(work.dispatch.request_id)]
    connection.prefill.back(write, error="a flush error")
    if client.outcome is None and client.process.alive:
        client.leaves = True
        client.process.loop.call_soon(client.leave)
    return True


def connection_dies(cluster: "Cluster") -> bool:
    """Seen by either end, or by both; everything under way may still land."""
    found = _busy(cluster) or [c for c in cluster.ether.connections if c.usable and c.target_open]
    if not found:
        return False
    connection = cluster.rng.choice(found)
    sides = cluster.rng.choice(
        ((connection.decode,), (connection.prefill,), (connection.decode, connection.prefill))
    )
    for side in sides:
        cluster.ether.told(connection, side)
    return True


def nic_loss(cluster: "Cluster") -> bool:
    """An interface goes down and comes back; its host may or may not notice."""
    process = _pick(cluster)
    if process is not None:
        _lose_nic(cluster, process, cluster.rng.randrange(process.spec.nics))
    return process is not None


def _nic_group(cluster: "Cluster") -> "tuple[Process, list[int]] | None":
    """Some of a node's NICs, as they belong to one of its devices, but not all."""
    process = _pick(cluster)
    if process is None or process.spec.nics < 2:
        return None
    return process, cluster.rng.sample(range(process.spec.nics), process.spec.nics // 2)


def nic_group_loss(cluster: "Cluster") -> bool:
    """All NICs of a device fail at once."""
    found = _nic_group(cluster)
    if found is not None:
        for nic in found[1]:
            _lose_nic(cluster, found[0], nic)
    return found is not None


def nic_group_late(cluster: "Cluster") -> bool:
    """What goes over the NICs of a device comes late, while the others are as fast as ever."""
    found = _nic_group(cluster)
    if found is None:
        return False
    process, nics = found
    late, ends = cluster.ether.nic_late, [(process.spec.name, nic) for nic in nics]
    late.update(dict.fromkeys(ends, cluster.rng.uniform(0.05, 1.0)))
    for end in ends:
        cluster.kernel.at(cluster.rng.uniform(0.5, 4.0), late.pop, end, None)
    return True


def _lose_nic(cluster: "Cluster", process: "Process", nic: int) -> None:
    ether = cluster.ether
    ether.nic_down.add((process.spec.name, nic))
    cluster.kernel.at(cluster.rng.uniform(0.2, 9.0), ether.nic_back, process.spec.name, nic)
    if cluster.rng.random() < 0.5:
        end_connections(cluster, process, nic)


def end_connections(cluster: "Cluster", process: "Process", nic: int) -> None:
    """The host notices that its NIC is dead."""
    side = 0 if process.spec.role is Role.DECODE else 1
    ether = cluster.ether
    for connection in ether.connections:
        if (connection.decode, connection.prefill)[side] is not process.core:
            continue
        if connection.pair[side] == nic:
            process.later(ether.quick(), lambda one=connection: ether.tell_lost(one, process.core))


def worker_dies(cluster: "Cluster") -> bool:
    process = _pick(cluster)
    odd = [one for one, _ in _odd(cluster)]
    if odd and cluster.rng.random() < 0.5:
        process = cluster.rng.choice(odd)
    elif process is None or not process.busy or cluster.rng.random() < PATIENCE:
        return False
    if process.dead:
        return False
    groups = [one for one in process.groups if one.steps.busy] or process.groups
    process.loop.call_soon(cluster.rng.choice(groups).worker.die)
    return True


def _odd(cluster: "Cluster") -> "list[tuple[Process, PushWork]]":
    """Pushes in the states that do not last."""
    return [
        (process, work)
        for process in cluster.processes.values()
        if process.pushes is not None
        for work in process.pushes._work.values()
        if work.push.state in (PushState.FAILED, PushState.CANCELLING, PushState.REPLAY)
    ]


def client_leaves(cluster: "Cluster") -> bool:
    """Any, or one whose request is in trouble already."""
    found = [c for c in cluster.clients if c.outcome is None and not c.leaves and c.process.alive]
    odd = {work.dispatch.request_id for _, work in _odd(cluster)}
    troubled = [client for client in found if client.request.request_id in odd]
    if not found or (not troubled and cluster.rng.random() < PATIENCE):
        return False
    client = cluster.rng.choice(troubled or found)
    client.leaves = True
    client.process.loop.call_soon(client.leave)
    return True


def clients_leave(cluster: "Cluster") -> bool:
    return sum(client_leaves(cluster) for _ in range(5)) > 0


def drain(cluster: "Cluster") -> bool:
    process = _pick(cluster, Role.PREFILL)
    if process is None or process.pushes is None or process.pushes.draining:
        return False
    process.loop.call_soon(process.drain, True)
    cluster.kernel.at(
        cluster.rng.uniform(0.2, 2.0), lambda: process.loop.call_soon(process.drain, False)
    )
    return True


def _not_reading(cluster: "Cluster", core: "Core", immediate: int) -> bool:
    """Whether the immediate is of a grant whose pages nobody reads, although all landed."""
    process = cluster.processes.get(core.node)
    if process is None or process.core is not core or process.pulls is None:
        return False
    pull = process.pulls._by_slot.get(immediate >> 20)
    return pull is not None and pull.grant.state is not GrantState.COMPLETE


def stray_immediate(cluster: "Cluster") -> bool:
    """An immediate comes twice: after the count is complete, or after its grant is over."""
    found = []
    for core, immediate, weight in cluster.ether.seen[-60:]:
        counter = core.slots.get(immediate >> 20)
        old = counter is None or counter.generation != immediate >> 12 & 0xFF
        if core.alive and (old or (counter is not None and counter.count >= counter.expected)):
            found.append((core, immediate, weight, old))
    if not found:
        return False
    late = [one for one in found if one[3] and one[1] >> 20 in one[0].slots]
    over = [one for one in found if not one[3]]
    odd = [one for one in over if _not_reading(cluster, one[0], one[1])]
    if not odd and cluster.rng.random() < PATIENCE:
        return False
    kinds = [odd] if odd else [kind for kind in (late, over, found) if kind]
    core, immediate, weight, _ = cluster.rng.choice(cluster.rng.choice(kinds))
    core.later(0.0, lambda: core.count(immediate, weight))
    return True


FAULTS = (
    Fault("link cut", link_cut),
    Fault("link partition", link_partition),
    Fault("fabric partition", fabric_partition),
    Fault("partition", partition),
    Fault("crash", crash),
    Fault("freeze", freeze),
    Fault("slow", slow),
    Fault("write error", write_error),
    Fault("error and leave", error_and_leave),
    Fault("connection dies", connection_dies),
    Fault("NIC loss", nic_loss),
    Fault("NIC group lost", nic_group_loss),
    Fault("NIC group late", nic_group_late),
    Fault("worker dies", worker_dies),
    Fault("client leaves", client_leaves),
    Fault("clients leave", clients_leave),
    Fault("drain", drain),
    Fault("stray immediate", stray_immediate),
)

_UNCALM = (link_partition, fabric_partition, partition, freeze, slow, nic_loss, nic_group_loss,
           nic_group_late, link_cut)  # fmt: skip
CALM = tuple(fault for fault in FAULTS if fault.act not in _UNCALM)
"""After these every answer still comes."""
