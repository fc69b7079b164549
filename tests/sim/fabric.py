"""The transfer cores of all processes: what `_native.Fabric` does, without bytes and without mercy.

Writes land in any order, late, and also after they came back with an error, after the sender closed
its end, froze or died, until the *target* has fenced the connection. See tests/sim/wires.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdnode.fabric._native import FabricError
from tests.sim.kernel import promise
from tests.sim.memory import Memory
from tests.sim.wires import WHOLE, Connection, Ether, Event, Pair, Write

WINDOW = 8  # writes outstanding on one connection
MERGED_PAGES = 3  # in one write, where the route covers whole pages


@dataclass(slots=True, eq=False)
class Session:
    number: int
    token: bytes
    connections: dict[Pair, Connection] = field(default_factory=dict)  # by (local, remote)
    probing: bool = False
    fences: int = 0  # asked for and not done
    reopened: int = 0  # NICs to be registered anew after them


@dataclass(slots=True, eq=False)
class _Due:
    counter: int  # −1: due now
    needs: int
    source_rank: int
    target_rank: int
    layer: int
    heads: tuple[int, int, int]  # first cell at the source, first at the target, how many
    pages: list[tuple[int, int]]  # (source, target)


@dataclass(slots=True, eq=False)
class Transfer:
    number: int
    session: Session
    immediate: int
    key: str = ""
    todo: list[_Due] = field(default_factory=list)
    outstanding: int = 0
    finished: bool = False
    stopped: bool = False
    failed: bool = False
    ended: bool = False
    errors: set[Pair] = field(default_factory=set)  # (local, remote)


@dataclass(slots=True)
class Counter:
    generation: int
    expected: int
    count: int = 0
    told: bool = False


class Core:
    """One process's core. Calls only queue, as the native ones; `emit` hands over an event."""

    limits: dict[str, int | str | bool] = {"endpoint": "msg"}  # noqa: RUF012 - as the native one

    def __init__(
        self,
        ether: Ether,
        node: str,
        memories: Sequence[Memory],
        *,
        later: Callable[[float, Callable[[], None]], None],
        emit: Callable[[Event], None],
        key_of: Callable[[int], str],
    ) -> None:
        self.ether = ether
        self.node = node
        self.memories = memories  # one a group; ranks are numbered group by group
        self.geometry = memories[0].geometry
        self.writable = memories[0].writable
        self.alive = True
        self.frozen = False
        self.later = later  # waits longer while the process is frozen, for ever once it is dead
        self.emit = emit
        self.key_of = key_of  # the request of a transfer, for the checks
        self.sessions: dict[int, Session] = {}
        self.transfers: dict[int, Transfer] = {}
        self.slots: dict[int, Counter] = {}
        self.counters = [0] * len(self.ranks)  # layers raised, by rank
        self.fence_late_s = 0.0  # how much longer than ever a fence takes
        self._pumping = False

    # sessions

    def open_session(
        self, session: int, nics: Sequence[int], writable: Sequence[int], token: bytes
    ) -> None:
        if not self.alive:
            return
        found = self.sessions.get(session)
        if found is not None and found.fences:
            found.reopened += 1
            return
        if found is None:
            self.sessions[session] = Session(session, token)
        self.say(Event("opened", session))

    def descriptors(self, session: int) -> list[tuple[int, list[tuple[int, int, int, int, int]]]]:
        if session not in self.sessions:
            raise FabricError("descriptors: no such session")
        size = self.geometry.region_bytes
        regions = [-1, *(self.ranks if self.writable else ())]
        return [
            (region, [(nic, 0, size if region >= 0 else 4096, 0, session) for nic in self.nics])
            for region in regions
        ]

    @property
    def ranks(self) -> range:
        return range(len(self.memories) * self.geometry.tp)

    def memory_of(self, rank: int) -> tuple[Memory, int]:
        """The memory of its group, and its number there."""
        group, place = divmod(rank, self.geometry.tp)
        return self.memories[group], place

    @property
    def nics(self) -> range:
        return range(self.ether.nics[self.node])

    def carry(self, session: int, region: int, group: int) -> None:
        raise AssertionError("one device group reaches all memory")

    def endpoint_name(self, session: int, nic: int) -> bytes:
        raise AssertionError("only FI_EP_RDM has names")

    def connect(self, session: int, pair: Pair, endpoint: bytes, deadline_s: float) -> None:
        if self.alive:
            self.ether.connect(self, self.sessions[session], pair, endpoint, deadline_s)

    def set_remote(self, session: int, regions: Sequence[tuple[int, Sequence[object]]]) -> None:
        if self.alive and session not in self.sessions:
            raise FabricError("set_remote: no such session")

    def probe(self, session: int) -> None:
        found = self.sessions.get(session)
        if self.alive and found is not None:
            found.probing = True
            for connection in found.connections.values():
                self.ether.probe(self, connection)

    def fence(self, session: int, pair: Pair | None = None) -> None:
        if not self.alive:
            return
        if (found := self.sessions.get(session)) is not None and not self.writable:
            for at, connection in found.connections.items():
                connection.closing = connection.closing or pair in (None, at)
        if found is not None:
            found.fences += 1
        after_s = self.ether.quick() + self.fence_late_s
        self.later(after_s, lambda: self.do_fence(session, pair or WHOLE))

    def do_fence(self, session: int, pair: Pair) -> None:
        found = self.sessions.get(session)
        if found is not None:
            found.fences -= 1
            for at in list(found.connections) if pair == WHOLE else [pair]:
                connection = found.connections.pop(at, None)
                if connection is not None:
                    self.ether.close(connection, self)
            if pair == WHOLE:
                del self.sessions[session]
                for transfer in list(self.transfers.values()):
                    if transfer.session is found and (transfer.todo or transfer.outstanding):
                        self.fail(transfer, "the session was fenced")
                        self.look(transfer)
        self.emit(Event("fenced", session, pair))
        if found is not None and pair != WHOLE and not found.fences:
            opened, found.reopened = found.reopened, 0
            for _ in range(opened):
                self.say(Event("opened", session))

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
        for layer in range(layers):
            needs = base + layer + 1 if counter >= 0 else 0
            core.todo += [
                _Due(counter, needs, region, remote_rank, layer, heads, pages) for pages in parts
            ]
        self.pump()

    def finish(self, transfer: int) -> None:
        if self.alive:
            self.transfers[transfer].finished = True
            self.look(self.transfers[transfer])

    def stop(self, transfer: int) -> None:
        if self.alive:
            core = self.transfers[transfer]
            core.stopped = True
            core.todo.clear()
            self.look(core)

    def close_transfer(self, transfer: int) -> list[tuple[int, ...]]:
        if self.alive:
            core = self.transfers.pop(transfer)
            promise(core.ended, "a transfer was closed that may still speak")
        return []

    def raised(self, rank: int) -> None:
        """The worker has computed one more layer."""
        self.counters[rank] += 1
        self.pump()

    # inside

    def say(self, event: Event) -> None:
        """From the progress thread, so not before the call that caused it has returned."""
        self.later(0.0, lambda: self.emit(event))

    def pump(self) -> None:
        if not self._pumping:
            self._pumping = True
            self.later(self.ether.quick(), self._post)

    def _post(self) -> None:
        """Posts what is due, within the window."""
        self._pumping = False
        for transfer in list(self.transfers.values()):
            if transfer.failed:
                continue
            waiting = []
            for due in transfer.todo:
                raised = due.counter < 0 or self.counters[due.counter] >= due.needs
                if not raised or transfer.failed or not self._post_one(transfer, due):
                    waiting.append(due)
            if not transfer.failed:
                transfer.todo = waiting
            self.look(transfer)

    def _post_one(self, transfer: Transfer, due: _Due) -> bool:
        """False if it has to wait for the window."""
        ways = [c for c in transfer.session.connections.values() if c.postable]
        if not ways:
            self.fail(transfer, "no connection is left")
            return False
        ways = [c for c in ways if c.outstanding < WINDOW]
        if not ways:
            return False
        connection = ways[0] if len(ways) == 1 else self.ether.kernel.rng.choice(ways)
        write = Write(transfer, connection, due.source_rank, due.target_rank, due.layer,
                      due.heads, due.pages, transfer.immediate)  # fmt: skip
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
        if error:
            transfer.errors.add(write.connection.prefill_pair)
            self.fail(transfer, error)
        self.look(transfer)
        self.pump()

    def fail(self, transfer: Transfer, text: str) -> None:
        if transfer.failed or transfer.ended:
            return
        transfer.failed = True
        transfer.todo.clear()
        self.say(
            Event("failed", transfer=transfer.number, text=text, pairs=sorted(transfer.errors))
        )

    def quiet(self, transfer: Transfer) -> bool:
        """No write of it is outstanding, over any connection."""
        return transfer.outstanding == 0

    def look(self, transfer: Transfer) -> None:
        if transfer.ended or transfer.todo or not self.quiet(transfer):
            return
        if transfer.failed or transfer.stopped or transfer.finished:
            transfer.ended = True
            kind = "settled" if transfer.failed else "drained"
            self.say(Event(kind, transfer=transfer.number, pairs=sorted(transfer.errors)))
