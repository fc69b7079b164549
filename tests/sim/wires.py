"""What is between the cores: connections, and writes that are under way.

A write that is posted will try to land once, later; nothing but the target's fence takes that back.
Its completion is a second, later thing, and may be an error although the write lands.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from tests.sim.kernel import Kernel
from tests.sim.network import Route

if TYPE_CHECKING:
    from tests.sim.fabric import Core
    from tests.sim.parts import Session, Transfer

Pair = tuple[int, int]
WHOLE = (-1, -1)
CUT_SHORT = 0.3  # of the writes of a sender that is gone, so many never land
HALF_LANDED = 0.3  # of those that land late, so many do without their immediate


@dataclass(frozen=True, slots=True)
class Event:
    """As `_native.Event`."""

    kind: str
    session: int = 0
    pair: Pair = WHOLE
    slot: int = 0
    generation: int = 0
    transfer: int = 0
    text: str = ""
    pairs: list[Pair] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Write:
    """`pages`: (source, target), `weight` is their number."""

    transfer: "Transfer"
    connection: "Connection"
    source_rank: int
    target_rank: int
    layer: int
    heads: tuple[int, int, int]
    pages: list[tuple[int, int]]
    immediate: int
    key: int  # of the registration that it goes to
    content: list[int] | None = None  # read from the source when that is not possible later
    landed: bool = False
    back: bool = False
    dropped: bool = False
    postponed: bool = False


@dataclass(slots=True, eq=False)
class Connection:
    """One incarnation of a NIC pair. `pair`: (decode NIC, prefill NIC)."""

    decode: "Core"
    prefill: "Core"
    decode_session: int
    prefill_session: int
    pair: Pair
    route: Route
    target_open: bool = True
    sender_open: bool = True
    broken: bool = False  # the sender's end has died, and its core knows
    closing: bool = False  # the sender has asked for the fence: commands are taken in order
    outstanding: int = 0
    writes: list[Write] = field(default_factory=list)  # that may land or have not come back
    probes: set[str] = field(default_factory=set)
    probed: bool = False

    @property
    def prefill_pair(self) -> Pair:
        return self.pair[1], self.pair[0]

    @property
    def usable(self) -> bool:
        return self.sender_open and not self.broken

    @property
    def postable(self) -> bool:
        return self.usable and self.probed and not self.closing


class Ether:
    """The fabric of the cluster. `nics`: how many each node has; `nic_down`: (node, NIC)."""

    def __init__(
        self,
        kernel: Kernel,
        nics: dict[str, int],
        *,
        route: Callable[[str, str], Route],
        find: Callable[[str], "Core | None"],
        delay: Callable[[], float],
    ) -> None:
        self.kernel = kernel
        self.nics = nics
        self.nic_down: set[tuple[str, int]] = set()
        self.nic_late: dict[tuple[str, int], float] = {}  # seconds more for what goes over it
        self.check_land: Callable[[Write], None] = lambda write: None
        self.connections: list[Connection] = []
        self._route = route
        self._find = find
        self._delay = delay
        self._nic_held: list[Callable[[], None]] = []
        self._keys = count(1)
        self.seen: list[tuple[Core, int, int]] = []  # (target, immediate, weight) of landed writes

    def quick(self) -> float:
        """How long a progress thread takes to get to something; now and then it is starved."""
        rng = self.kernel.rng
        return rng.random() * (0.001 if rng.random() < 0.9 else 0.05)

    def new_key(self) -> int:
        """Of a registration; none is used twice."""
        return next(self._keys)

    # connections

    def connect(
        self, core: "Core", session: "Session", pair: Pair, endpoint: bytes, deadline_s: float
    ) -> None:
        node = endpoint.decode().rpartition(":")[0]
        route = self._route(core.node, node)
        before = session.connections.get(pair)

        def give_up() -> None:
            there = session.connections.get(pair)
            if there is before and core.sessions.get(session.number) is session:
                core.emit(Event("lost", session.number, pair, text="no answer"))

        core.later(deadline_s, give_up)
        self.kernel.at(self._delay(), self._arrive, core, session, pair, node, route)

    def _arrive(
        self, core: "Core", session: "Session", pair: Pair, node: str, route: Route
    ) -> None:
        if route.down or self._down(core.node, pair[0], node, pair[1]):
            return  # the deadline will tell
        peer = self._find(node)
        if not core.alive or core.sessions.get(session.number) is not session:
            return
        if peer is None:
            core.later(0.0, lambda: core.emit(Event("lost", session.number, pair, text="refused")))
            return
        if peer.frozen:
            return
        theirs = next((s for s in peer.sessions.values() if s.token == session.token), None)
        if not core.registered(session.number, pair[0]):
            return  # fenced meanwhile
        if theirs is None or not peer.registered(theirs.number, pair[1]):
            core.later(0.0, lambda: core.emit(Event("lost", session.number, pair, text="rejected")))
            return
        connection = Connection(core, peer, session.number, theirs.number, pair, route)
        session.connections[pair] = connection
        theirs.connections[pair[1], pair[0]] = connection
        self.connections = [c for c in self.connections if c.target_open or c.writes]
        self.connections.append(connection)
        for side, number, local in (
            (core, session.number, pair),
            (peer, theirs.number, connection.prefill_pair),
        ):
            found = Event("connected", number, local)
            side.later(self._delay(), lambda side=side, found=found: side.emit(found))

    def probe(self, core: "Core", connection: Connection) -> None:
        """Both ends' probes have to cross; then each is told."""
        if connection.probed:
            return
        connection.probes.add(core.node)
        if len(connection.probes) == 2:
            self.kernel.at(2 * self._delay(), self._probed, connection)

    def _probed(self, connection: Connection) -> None:
        if not (connection.target_open and connection.usable):
            return
        if self.blocked(connection):
            self.hold(connection, lambda: self._probed(connection))
            return
        connection.probed = True
        decode, prefill = connection.decode, connection.prefill
        one = Event("probed", connection.decode_session, connection.pair)
        two = Event("probed", connection.prefill_session, connection.prefill_pair)
        decode.later(self.quick(), lambda: decode.emit(one))
        prefill.later(self.quick(), lambda: prefill.emit(two))

    def blocked(self, connection: Connection) -> bool:
        return connection.route.down or self._down(
            connection.decode.node, connection.pair[0],
            connection.prefill.node, connection.pair[1],
        )  # fmt: skip

    def _down(self, decode: str, here: int, prefill: str, there: int) -> bool:
        return bool(self.nic_down) and (
            (decode, here) in self.nic_down or (prefill, there) in self.nic_down
        )

    def _late(self, connection: Connection) -> float:
        ends = (
            (connection.decode.node, connection.pair[0]),
            (connection.prefill.node, connection.pair[1]),
        )
        return sum(self.nic_late.get(end, 0.0) for end in ends)

    def hold(self, connection: Connection, act: Callable[[], None]) -> None:
        if connection.route.down:
            connection.route.hold(act)
        else:
            self._nic_held.append(act)

    def nic_back(self, node: str, nic: int) -> None:
        self.nic_down.discard((node, nic))
        held, self._nic_held = self._nic_held, []
        for act in held:
            self.kernel.at(self._delay(), act)

    def close(self, connection: Connection, side: "Core") -> None:
        """One end closes; the other hears of it if the network lets it."""
        if side is connection.decode:
            if not connection.target_open:
                return
            connection.target_open = False
            for write in connection.writes:
                if not write.landed and not write.dropped:
                    self._count_landing(write, -1)
            other = connection.prefill
        else:
            if not connection.sender_open:
                return
            self.abandon(connection)
            for write in list(connection.writes):
                side.back(write, error="the connection was closed")
            other = connection.decode
        self.told(connection, other)

    def told(self, connection: Connection, side: "Core") -> None:
        """This side hears of the end of a connection, when the network lets it."""
        self.kernel.at(self._delay(), self._heard, connection, side)

    def abandon(self, connection: Connection) -> None:
        """The sender is gone or closed its end: what it had posted may land all the same, late."""
        connection.sender_open = False
        for write in connection.writes:
            if write.landed or write.dropped:
                continue
            write.content = self._read(write)
            if self.kernel.rng.random() < CUT_SHORT:
                write.dropped = True
                if connection.target_open:
                    self._count_landing(write, -1)
        self._forget(connection)

    def _heard(self, connection: Connection, side: "Core") -> None:
        """The other end was closed, or the connection is dead."""
        if not side.alive:
            return
        if self.blocked(connection):
            self.hold(connection, lambda: self._heard(connection, side))
        elif side.frozen:
            side.later(0.0, lambda: self._heard(connection, side))
        else:
            self.tell_lost(connection, side)

    def tell_lost(self, connection: Connection, side: "Core") -> None:
        if side is connection.decode:
            if connection.target_open:
                side.emit(Event("lost", connection.decode_session, connection.pair, text="died"))
        elif connection.usable:
            connection.broken = True
            for write in list(connection.writes):
                side.back(write, error="the connection died")
            number = connection.prefill_session
            side.emit(Event("lost", number, connection.prefill_pair, text="died"))

    # writes

    def post(self, write: Write, core: "Core") -> None:
        write.connection.writes.append(write)
        being_read = core.memory_of(write.source_rank)[0].being_read
        for source, _ in write.pages:
            being_read[source] += 1
        if write.connection.target_open:
            self._count_landing(write, 1)
        late_s = self._late(write.connection)
        self.kernel.at(self._delay() + late_s, self._land, write)

    def _land(self, write: Write) -> None:
        connection = write.connection
        target = connection.decode
        if write.dropped or write.landed or not connection.target_open or not target.alive:
            return
        if self.blocked(connection):
            self.hold(connection, lambda: self._land(write))
            return
        if target.frozen:  # its progress thread does not poll
            target.later(self._delay(), lambda: self._land(write))
            return
        if write.back and not write.postponed:
            write.postponed = True
            self.kernel.at(self.kernel.rng.random() * 2.0, self._land, write)
            return
        content = self._read(write) if write.content is None else write.content
        write.landed = True
        self._count_landing(write, -1)
        self.check_land(write)
        self._put(write, content)
        if write.back and self.kernel.rng.random() < HALF_LANDED:
            return  # the rest of it was cut off, its immediate with it
        self.seen.append((target, write.immediate, len(write.pages)))
        target.count(write.immediate, len(write.pages))
        self.kernel.at(self._delay(), self._acknowledge, write)

    def _acknowledge(self, write: Write) -> None:
        core = write.connection.prefill
        if write.back or not core.alive:
            return
        if self.blocked(write.connection):
            self.hold(write.connection, lambda: self._acknowledge(write))
        elif core.frozen:
            core.later(self.quick(), lambda: self._acknowledge(write))
        elif write.connection.usable:
            core.back(write)

    def came_back(self, write: Write, core: "Core") -> None:
        if write.content is None and not write.landed:
            write.content = self._read(write)
        being_read = core.memory_of(write.source_rank)[0].being_read
        for source, _ in write.pages:
            being_read[source] -= 1
        self._forget(write.connection)

    def _forget(self, connection: Connection) -> None:
        connection.writes = [
            w for w in connection.writes
            if not w.back or not (w.landed or w.dropped or not connection.target_open)
        ]  # fmt: skip

    def _count_landing(self, write: Write, by: int) -> None:
        may_land = write.connection.decode.memory_of(write.target_rank)[0].may_land
        for _, target in write.pages:
            may_land[target] += by

    def _read(self, write: Write) -> list[int]:
        memory, rank = write.connection.prefill.memory_of(write.source_rank)
        first, _, count = write.heads
        base = rank * memory.heads + first
        return [
            memory.cells[base + head][write.layer][source]
            for head in range(count)
            for source, _ in write.pages
        ]

    def _put(self, write: Write, content: list[int]) -> None:
        memory, rank = write.connection.decode.memory_of(write.target_rank)
        _, first, count = write.heads
        base = rank * memory.heads + first
        values = iter(content)
        for head in range(count):
            for _, target in write.pages:
                memory.cells[base + head][write.layer][target] = next(values)
