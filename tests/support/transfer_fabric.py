"""A little fabric under both messengers: connections, writes that land late, cores that count.

It stands at the boundary of `pdnode.fabric._native.Fabric`. Nothing moves by itself: the world
(transfer_world.py) picks what happens next. It is as unkind as the real thing was measured to be:
writes land in any order, also after they came back with an error and after the sender closed its
end, until the *target* has fenced the connection; a fence drops immediates that were not counted.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Pair = tuple[int, int]  # (decode NIC, prefill NIC)


@dataclass(slots=True)
class Event:
    """As `_native.Event`; pairs as (local, remote) of the side that hears it."""

    kind: str
    session: int = 0
    slot: int = 0
    generation: int = 0
    transfer: int = 0
    text: str = ""
    pair: Pair = (-1, -1)
    pairs: list[Pair] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Connection:
    """One incarnation of a NIC pair."""

    session: int
    pair: Pair
    sender_open: bool = True
    broken: bool = False  # every write comes back with an error from now on, nobody knows yet
    target_open: bool = True
    writes: list["Write"] = field(default_factory=list)
    uncounted: deque["Write"] = field(default_factory=deque)

    def may_land(self) -> Iterator["Write"]:
        return (write for write in self.writes if self.target_open and not write.landed)

    @property
    def fails(self) -> bool:
        """Whether what is outstanding comes back with an error."""
        return self.broken or not self.sender_open or not self.target_open


@dataclass(slots=True, eq=False)
class Write:
    """One page of one layer on one route: weight 1."""

    transfer: "CoreTransfer"
    connection: Connection
    source: int
    cell: tuple[int, int, int]  # destination (rank, page, layer)
    landed: bool = False
    back: bool = False  # the sender has its completion, of either kind


@dataclass(slots=True, eq=False)
class _Due:
    needs: int  # value of the layer counter; −1: due now
    source: int
    cell: tuple[int, int, int]


@dataclass(slots=True, eq=False)
class CoreTransfer:
    number: int
    session: int
    immediate: int
    todo: list[_Due] = field(default_factory=list)
    outstanding: int = 0
    finished: bool = False
    stopped: bool = False
    failed: bool = False
    ended: bool = False
    errors: set[Pair] = field(default_factory=set)


class Fabric:
    """Both cores and what is between them. `connections` holds the current incarnations."""

    def __init__(self) -> None:
        self.connections: dict[tuple[int, Pair], Connection] = {}
        self.all_connections: list[Connection] = []
        self.counter = 0
        self.transfers: dict[int, CoreTransfer] = {}
        self.sender = SenderFace(self)
        self.target = TargetFace(self)

    def connect(self, session: int, pair: Pair) -> None:
        connection = Connection(session, pair)
        self.connections[session, pair] = connection
        self.all_connections.append(connection)

    def writes(self) -> Iterator[Write]:
        return (write for one in self.all_connections for write in one.writes)

    def may_land(self) -> list[Write]:
        return [write for one in self.all_connections for write in one.may_land()]

    def forget_old(self) -> None:
        """Keeps the lists short: writes whose story is over."""
        for one in self.all_connections:
            one.writes = [
                w for w in one.writes if not (w.back and (w.landed or not one.target_open))
            ]


class SenderFace:
    """The prefill node's core."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.events: deque[Event] = deque()
        self.on_post: Callable[[Write], None] = lambda write: None

    # _native.Fabric

    def open_transfer(self, transfer: int, session: int, immediate: int) -> None:
        assert transfer not in self._fabric.transfers
        self._fabric.transfers[transfer] = CoreTransfer(transfer, session, immediate)

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
        core = self._fabric.transfers[transfer]
        assert not core.finished
        if core.failed or core.stopped:
            return
        core.todo += [
            _Due(
                -1 if counter < 0 else base + layer + 1,
                source + index,
                (remote_rank, destination + index, layer),
            )
            for layer in range(layers)
            for source, destination, count in spans
            for index in range(count)
        ]

    def finish(self, transfer: int) -> None:
        core = self._fabric.transfers[transfer]
        core.finished = True
        self.look(core)

    def stop(self, transfer: int) -> None:
        core = self._fabric.transfers[transfer]
        core.stopped = True
        core.todo.clear()
        self.look(core)

    def close_transfer(self, transfer: int) -> list[tuple[int, ...]]:
        core = self._fabric.transfers.pop(transfer)
        assert core.ended, "closed while it may still speak"
        return []

    def fence(self, session: int, pair: Pair | None = None) -> None:
        """Closes our end: what is outstanding will come back with an error, and may still land."""
        for (number, wire_pair), one in self._fabric.connections.items():
            if number == session and (pair is None or wire_pair == (pair[1], pair[0])):
                one.sender_open = False

    # the world

    def due(self) -> list[CoreTransfer]:
        return [
            core
            for core in self._fabric.transfers.values()
            if not core.failed and any(due.needs <= self._fabric.counter for due in core.todo)
        ]

    def post(self, core: CoreTransfer, pick: Callable[[list[Connection]], Connection]) -> None:
        """Posts the next write that is due over one of the open connections, or fails."""
        ways = [
            one
            for (session, _), one in self._fabric.connections.items()
            if session == core.session and one.sender_open
        ]
        if not ways:
            self._fail(core, "no connection is left")
            self.look(core)
            return
        due = next(due for due in core.todo if due.needs <= self._fabric.counter)
        core.todo.remove(due)
        write = Write(core, pick(ways), due.source, due.cell)
        core.outstanding += 1
        write.connection.writes.append(write)
        self.on_post(write)

    def success(self, write: Write) -> None:
        self._back(write)
        self.look(write.transfer)

    def error(self, write: Write) -> None:
        self._back(write)
        local, remote = write.connection.pair[1], write.connection.pair[0]
        write.transfer.errors.add((local, remote))
        self._fail(write.transfer, "a write came back with an error")
        self.look(write.transfer)

    def look(self, core: CoreTransfer) -> None:
        if core.ended or core.outstanding or core.todo:
            return
        if core.failed or core.stopped or core.finished:
            core.ended = True
            kind = "settled" if core.failed else "drained"
            self.events.append(Event(kind, transfer=core.number, pairs=sorted(core.errors)))

    def _back(self, write: Write) -> None:
        assert not write.back
        write.back = True
        write.transfer.outstanding -= 1

    def _fail(self, core: CoreTransfer, text: str) -> None:
        if core.failed:
            return
        core.failed = True
        core.todo.clear()
        pairs = sorted(core.errors)
        self.events.append(Event("failed", transfer=core.number, text=text, pairs=pairs))


@dataclass(slots=True)
class _Counter:
    generation: int
    expected: int
    count: int = 0


class TargetFace:
    """The decode node's core."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.events: deque[Event] = deque()
        self.fences: list[tuple[int, Pair]] = []  # asked for, not done
        self.counters: dict[int, _Counter] = {}
        self.on_land: Callable[[Write], None] = lambda write: None
        self.dropped: set[int] = set()  # immediates that fences dropped counts of

    # _native.Fabric

    def arm(self, slot: int, generation: int, session: int, expected: int) -> None:
        assert slot not in self.counters
        assert expected > 0
        self.counters[slot] = _Counter(generation, expected)

    def disarm(self, slot: int) -> None:
        del self.counters[slot]

    def counted(self, slot: int) -> int:
        return self.counters[slot].count

    def fence(self, session: int, pair: Pair | None = None) -> None:
        assert pair is not None, "the link fences whole sessions"
        self.fences.append((session, pair))

    # the world

    def land(self, write: Write) -> None:
        assert write.connection.target_open
        write.landed = True
        write.connection.uncounted.append(write)
        self.on_land(write)

    def count(self, connection: Connection) -> None:
        write = connection.uncounted.popleft()
        slot, generation = write.transfer.immediate >> 20, write.transfer.immediate >> 12 & 0xFF
        counter = self.counters.get(slot)
        if counter is None or counter.generation != generation:
            return  # late: the grant is over
        counter.count += 1
        if counter.count == counter.expected:
            self.events.append(Event("reached", slot=slot, generation=generation))
        elif counter.count == counter.expected + 1:
            self.events.append(Event("overshoot", slot=slot, generation=generation))

    def close(self, connection: Connection) -> None:
        """The fence itself."""
        connection.target_open = False
        self.dropped |= {write.transfer.immediate for write in connection.uncounted}
        connection.uncounted.clear()
