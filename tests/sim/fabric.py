"""The transfer cores of all processes: what `_native.Fabric` does, without bytes and without mercy.

Writes land in any order, late, and also after they came back with an error, after the sender closed
its end, froze or died, until the *target* has fenced the connection. See tests/sim/wires.py.
"""

from collections.abc import Sequence

from pdnode.fabric._native import FabricError
from tests.sim.kernel import promise
from tests.sim.parts import Counter, Due, Session, Transfer
from tests.sim.sessions import Sessions
from tests.sim.wires import Event, Write

WINDOW = 8  # writes outstanding on one connection
MERGED_PAGES = 3  # in one write, where the route covers whole pages


class Core(Sessions):
    """One process's core: slots that count, and transfers."""

    # target side

    def arm(self, slot: int, generation: int, session: int, expected: int) -> None:
        if self.alive:
            promise(slot not in self.slots, "a slot was armed twice")
            assert expected > 0
            self.slots[slot] = Counter(generation, expected)

    def disarm(self, slot: int) -> None:
        if self.alive:
            counter = self.slots.pop(slot)
            missed = counter.count >= counter.expected and not counter.told
            promise(not missed, "the count was there, and nobody was told")

    def counted(self, slot: int) -> int:
        counter = self.slots.get(slot)
        return counter.count if counter is not None else 0

    def count(self, immediate: int, weight: int) -> None:
        """An immediate arrived. Late ones are dropped: the grant is over."""
        slot, generation = immediate >> 20, immediate >> 12 & 0xFF
        counter = self.slots.get(slot)
        if counter is None or counter.generation != generation:
            return
        before = counter.count
        counter.count += weight
        if before < counter.expected <= counter.count:
            counter.told = True
            self.say(Event("reached", slot=slot, generation=generation))
        if before <= counter.expected < counter.count:
            self.say(Event("overshoot", slot=slot, generation=generation))

    # sender side

    def open_transfer(self, transfer: int, session: int, immediate: int) -> None:
        if not self.alive:
            return
        assert transfer not in self.transfers
        found = self.sessions.get(session)
        if found is None:
            raise FabricError("open_transfer: no such session")
        self.transfers[transfer] = Transfer(transfer, found, immediate)

    def submit(
        self,
        transfer: int,
        counter: int,
        base: int,
        layers: int,
        region: int,
        source_layer_stride: int,
        source_page_stride: int,
        source_offset: int,
        remote_rank: int,
        remote_layer_stride: int,
        remote_page_stride: int,
        remote_offset: int,
        length: int,
        whole_page: bool,
        spans: Sequence[tuple[int, int, int]],
        group: int = -1,
    ) -> None:
        if not self.alive:
            return
        core = self.transfers[transfer]
        assert not core.finished
        if core.failed or core.stopped:
            return
        head = self.geometry.head_bytes
        heads = (source_offset // head, remote_offset // head, length // head)
        most = self.ether.kernel.rng.randint(1, MERGED_PAGES) if whole_page else 1
        parts = []
        for source, target, count in spans:
            for first in range(0, count, most):
                some = range(first, min(first + most, count))
                parts.append([(source + index, target + index) for index in some])
        found: list[Due] = []
        for layer in range(layers):
            needs = base + layer + 1 if counter >= 0 else 0
            found += [
                Due(group, counter, needs, region, remote_rank, layer, heads, pages)
                for pages in parts
            ]
        core.groups.add(group)
        core.coming += 1
        self.post(group, lambda: self._begin(core, found, group))

    def _begin(self, transfer: Transfer, found: list[Due], group: int) -> None:
        transfer.coming -= 1
        if not self._holds(transfer.session, transfer.session.parts[group]):
            self.fail(transfer, "the session is closed", group)
        elif not transfer.failed and not transfer.stopped:
            transfer.todo += found
            self.pump(group)
        self.look(transfer)

    def finish(self, transfer: int) -> None:
        if self.alive:
            self.transfers[transfer].finished = True
            self.look(self.transfers[transfer])

    def stop(self, transfer: int) -> None:
        if self.alive:
            core = self.transfers[transfer]
            core.stopped = True
            for group in core.groups:
                self.post(group, lambda group=group: self._halt(core, group))  # type: ignore[misc]
            self.look(core)

    def _halt(self, transfer: Transfer, group: int) -> None:
        transfer.todo = [due for due in transfer.todo if due.group != group]
        self.look(transfer)

    def close_transfer(self, transfer: int) -> list[tuple[int, ...]]:
        if self.alive:
            core = self.transfers.pop(transfer)
            promise(core.ended, "a transfer was closed that may still speak")
        return []

    def raised(self, rank: int) -> None:
        """The worker has computed one more layer."""
        self.counters[rank] += 1
        for group in range(self.groups):
            self.pump(group)

    # inside

    def pump(self, group: int) -> None:
        if group not in self._pumping:
            self._pumping.add(group)
            self.later(self.ether.quick(), lambda: self._post(group))

    def _post(self, group: int) -> None:
        """Posts what is due, within the window."""
        self._pumping.discard(group)
        for transfer in list(self.transfers.values()):
            if transfer.failed or transfer.stopped:
                continue
            waiting = []
            for due in transfer.todo:
                raised = due.counter < 0 or self.counters[due.counter] >= due.needs
                mine = due.group == group and raised and not transfer.failed
                if not mine or not self._post_one(transfer, due):
                    waiting.append(due)
            if not transfer.failed:
                transfer.todo = waiting
            self.look(transfer)

    def _post_one(self, transfer: Transfer, due: Due) -> bool:
        """False if it has to wait for the window."""
        session, group = transfer.session, due.group
        keys = session.parts[group].remote.get(due.target_rank, {})
        ways = [
            c for c in session.connections.values()
            if c.postable and c.pair[0] in keys and self.group_of[c.pair[1]] == group
        ]  # fmt: skip
        if not ways:
            self.fail(transfer, f"no connection to rank {due.target_rank} of the peer is up", group)
            return False
        ways = [c for c in ways if c.outstanding < WINDOW]
        if not ways:
            return False
        connection = ways[0] if len(ways) == 1 else self.ether.kernel.rng.choice(ways)
        write = Write(
            transfer, connection, due.source_rank, due.target_rank, due.layer, due.heads,
            due.pages, transfer.immediate, keys[connection.pair[0]],
        )  # fmt: skip
        transfer.key = transfer.key or self.key_of(transfer.number)
        transfer.outstanding += 1
        connection.outstanding += 1
        self.ether.post(write, self)
        return True

    def back(self, write: Write, *, error: str = "") -> None:
        """A completion of either kind."""
        if write.back or not self.alive:
            return
        write.back = True
        self.ether.came_back(write, self)
        transfer = write.transfer
        transfer.outstanding -= 1
        write.connection.outstanding -= 1
        group = self.group_of[write.connection.pair[1]]
        if error:
            transfer.errors.add(write.connection.prefill_pair)
            self.fail(transfer, error, group)
        self.look(transfer)
        self.pump(group)

    def fail(self, transfer: Transfer, text: str, group: int) -> None:
        """Seen by this group; the others hear of it."""
        if transfer.failed or transfer.ended:
            return
        transfer.failed = True
        transfer.todo = [due for due in transfer.todo if due.group != group]
        for other in transfer.groups - {group}:
            self.post(other, lambda other=other: self._halt(transfer, other))  # type: ignore[misc]
        self.say(
            Event("failed", transfer=transfer.number, text=text, pairs=sorted(transfer.errors))
        )

    def part_closed(self, found: Session, group: int) -> None:
        for transfer in list(self.transfers.values()):
            if transfer.session is found and any(due.group == group for due in transfer.todo):
                self.fail(transfer, "the session was fenced", group)
                self.look(transfer)

    def quiet(self, transfer: Transfer) -> bool:
        """No write of it is outstanding, over any connection."""
        return transfer.outstanding == 0

    def look(self, transfer: Transfer) -> None:
        if transfer.ended or transfer.todo or transfer.coming or not self.quiet(transfer):
            return
        if transfer.failed or transfer.stopped or transfer.finished:
            transfer.ended = True
            kind = "settled" if transfer.failed else "drained"
            self.say(Event(kind, transfer=transfer.number, pairs=sorted(transfer.errors)))
