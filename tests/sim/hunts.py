"""Moments that chance alone hardly makes: they are recognized as they come, and used at once.

Every state change of both machines is shown here. Where one opens the way to a rare cell of the
table, the fault that leads there follows now and then. The draws are of their own, so that a seed
in which no such moment comes stays what it was.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdnode.core import wire
from pdnode.core.grant import GrantState
from pdnode.core.push import PushState
from pdnode.core.transfer import Effect, Send
from tests.sim.device_faults import crash_if_up
from tests.sim.faults import end_connections
from tests.sim.wires import Connection

if TYPE_CHECKING:
    from pdnode.messenger.pull import Pull
    from pdnode.messenger.push_work import PushWork
    from tests.sim.cluster import Cluster
    from tests.sim.fabric import Transfer
    from tests.sim.process import Process

LATE_FENCE_S = 3.0  # longer than a peer waits for it
LATEST_LENDING_S = 3.0


class Hunts:
    """Of one cluster."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._rng = random.Random(f"hunts of {cluster.seed}")
        self._leaving: set[str] = set()  # request keys

    def _strikes(self, name: str, chance: float) -> bool:
        cluster = self._cluster
        if not cluster.with_faults or cluster.healed or self._rng.random() >= chance:
            return False
        cluster.injected[name] += 1
        return True

    def leaves(self, key: str) -> bool:
        """Whether the client is to hang up in the turn in which this attempt is lost."""
        return key in self._leaving

    # device groups

    def lending(self, process: "Process", group: int) -> tuple[float, str]:
        """Memory is about to be registered with NICs of this group, which is not its own: how much
        later than ever that is done, and why it fails."""
        cluster = self._cluster
        if cluster.calm:
            return 0.0, ""
        late_s = 0.0
        if self._strikes("lending late", 0.4):
            late_s = LATEST_LENDING_S * self._rng.random()
        soon_s = late_s * self._rng.random()
        if self._strikes("lending group lost", 0.2):
            nics = sorted(process.spec.devices.nics[group])
            lost = self._rng.sample(nics, self._rng.randint(1, len(nics)))
            cluster.kernel.at(soon_s, self._end_all, process, lost)
        if self._strikes("lender crashes", 0.03):
            cluster.kernel.at(soon_s, crash_if_up, cluster, process, 0.05)
        return late_s, "no memory" if self._strikes("lending fails", 0.05) else ""

    def reopening(self, process: "Process", session: int, nics: Sequence[int]) -> float:
        """NICs are about to be registered anew: how much later than ever that is done. A device
        group of the decode node may lose all of its own meanwhile, and ask for theirs."""
        cluster = self._cluster
        token = process.core.sessions[session].token
        decode, groups = next(
            (
                (one, [group for group in one.spec.devices.nics if one is not process
                       or not group & set(nics)])
                for one in cluster.processes.values()
                if one.pulls is not None and len(one.spec.devices.nics) > 1
                for found in one.core.sessions.values() if found.token == token
            ),
            (process, []),
        )  # fmt: skip
        if cluster.calm or not groups or not self._strikes("group lost at return", 0.3):
            return 0.0
        late_s = 0.2 * self._rng.random()
        when_s = 1.5 * late_s * self._rng.random()  # before it is registered, or while it is probed
        cluster.kernel.at(when_s, self._end_all, decode, sorted(self._rng.choice(groups)))
        return late_s

    def returned(self, process: "Process", nic: int) -> None:
        """A pair is back. Those that carried memory for a group without any die at once."""
        mine = next(one for one in process.spec.devices.nics if nic in one)
        rest = sorted(mine - {nic})
        bare = any(link.bare_groups() for link in process.peers._links.values())
        if bare and rest and not self._cluster.calm and self._strikes("others lost at return", 0.6):
            self._end_all(process, rest)

    def _end_all(self, process: "Process", nics: Sequence[int]) -> None:
        for nic in nics:
            end_connections(self._cluster, process, nic)

    # the decode side

    def pull(self, process: "Process", pull: "Pull", effects: Sequence[Effect]) -> None:
        """After every input of a grant."""
        match pull.grant.state:
            case GrantState.DISPATCHED:
                self._dispatched(process, pull)
                if any(isinstance(e, Send) and isinstance(e.frame, wire.Regrant) for e in effects):
                    self._regranted(process, pull)
            case GrantState.COMPLETE if not pull.grant.drained:
                self._complete(process, pull)
            case GrantState.FAILED if not pull.grant.drained:
                self._failed(process, pull)

    def _dispatched(self, process: "Process", pull: "Pull") -> None:
        grant = pull.grant
        if grant.drained and not self._cluster.calm and self._strikes("lost at the end", 0.5):
            self._leaving.add(grant.key)
            process.loop.call_soon(process.peers.drop, pull.session, "its link was cut")
        for slot in grant.old_slots:
            counter = process.core.slots[slot.slot]
            if counter.count >= counter.expected and self._strikes("stray immediate", 0.5):
                process.core.later(0.0, lambda at=slot.immediate: process.core.count(at, 1))

    def _regranted(self, process: "Process", pull: "Pull") -> None:
        """The peer loses all connections while the word is on its way."""
        if self._strikes("lost at regrant", 0.03):
            for connection in self._connections(process, pull):
                self._tell(connection, at_prefill=True)

    def _complete(self, process: "Process", pull: "Pull") -> None:
        """Two connections die at once while completions are on their way."""
        found = self._connections(process, pull)
        if len(found) > 1 and self._strikes("two connections die", 0.003):
            for connection in self._rng.sample(found, 2):
                self._tell(connection, at_prefill=False)

    def _failed(self, process: "Process", pull: "Pull") -> None:
        """Immediates come again and again before the fence."""
        for slot in pull.grant.slots:
            counter = process.core.slots[slot.slot]
            more = counter.expected - counter.count + 1
            if more > 0 and self._strikes("stray immediate", 0.03):
                process.core.later(
                    0.0, lambda at=slot.immediate, more=more: process.core.count(at, more)
                )

    def _connections(self, process: "Process", pull: "Pull") -> list[Connection]:
        session = process.core.sessions.get(pull.session.session)
        return list(session.connections.values()) if session is not None else []

    # the prefill side

    def push(self, process: "Process", work: "PushWork") -> None:
        """After every input of a push."""
        push, attempt = work.push, work.push.attempt
        transfer = process.core.transfers.get(attempt.transfer) if attempt is not None else None
        if push.state is PushState.COMPUTED and transfer is not None:
            self._computed(transfer)
        elif push.state is PushState.REPLAY and attempt is not None and attempt.unfenced:
            self._replay(process, work)
        elif push.state is PushState.FAILED:
            if transfer is not None:
                self._fail_others(process, transfer)
            if not process.dead and self._strikes("worker dies", 0.1):
                process.loop.call_soon(self._rng.choice(process.groups).worker.die)

    def _computed(self, transfer: "Transfer") -> None:
        """A connection over which all has landed dies, while others have writes under way."""
        if transfer.todo or not transfer.outstanding:
            return
        idle = [c for c in transfer.session.connections.values() if c.usable and not c.outstanding]
        if idle and self._strikes("idle connection dies", 0.02):
            self._tell(self._rng.choice(idle), at_prefill=False)

    def _replay(self, process: "Process", work: "PushWork") -> None:
        """The fence that is waited for takes long, and several wait for it."""
        assert process.pushes is not None
        mates = [one for one in process.pushes._work.values() if one.session is work.session]
        session = process.core.sessions.get(work.session.session)
        if self._cluster.calm or len(mates) < 2 or session is None or not session.connections:
            return
        if self._strikes("late fence", 0.1):
            decode = next(iter(session.connections.values())).decode
            decode.fence_late_s = LATE_FENCE_S
            self._cluster.kernel.at(LATE_FENCE_S, setattr, decode, "fence_late_s", 0.0)

    def _fail_others(self, process: "Process", transfer: "Transfer") -> None:
        """It is given up already, and now writes fail over every connection that has some."""
        others = {
            connection: write
            for connection in transfer.session.connections.values()
            for write in connection.writes
            if write.transfer is transfer and not write.back
            and connection.prefill_pair not in transfer.errors
        }  # fmt: skip
        if others and self._strikes("write error", 0.9):
            for write in others.values():
                process.core.later(
                    0.0, lambda write=write: process.core.back(write, error="a flush error")
                )

    # both

    def _tell(self, connection: Connection, *, at_prefill: bool) -> None:
        side = connection.prefill if at_prefill else connection.decode
        ether = self._cluster.ether
        if side.alive:
            side.later(0.0, lambda: ether.tell_lost(connection, side))
