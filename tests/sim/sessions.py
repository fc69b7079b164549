"""A core's sessions: registrations, connections and fences, each by the thread of its group."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pdnode.fabric._native import FabricError
from pdnode.messenger.devices import Devices
from tests.sim.memory import Memory
from tests.sim.parts import SCRATCH, Counter, Part, Session, Transfer
from tests.sim.wires import WHOLE, Ether, Event, Pair


class Sessions:
    """Calls only queue, as the native ones; `emit` hands over an event.

    Every device group has a thread that takes commands in order, and another that registers.
    """

    limits: dict[str, int | str | bool] = {"endpoint": "msg"}  # noqa: RUF012 - as the native one

    def __init__(
        self,
        ether: Ether,
        node: str,
        memories: Sequence[Memory],
        devices: Devices,
        *,
        later: Callable[[float, Callable[[], None]], None],
        emit: Callable[[Event], None],
        key_of: Callable[[int], str],
        lending: Callable[[int], tuple[float, str]],
        reopening: Callable[[int, Sequence[int]], float],
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
        self.lending = lending  # group that carries → how late that comes, why it fails
        self.reopening = reopening  # session, NICs → how late their new registration comes
        self.devices = devices
        self.homes = device_homes(len(self.ranks), len(devices.nics))
        self.group_of = {nic: group for group, on in enumerate(devices.nics) for nic in on}
        self.sessions: dict[int, Session] = {}
        self.transfers: dict[int, Transfer] = {}
        self.slots: dict[int, Counter] = {}
        self.counters = [0] * len(self.ranks)  # layers raised, by rank
        self.fence_late_s = 0.0  # how much longer than ever a fence takes
        self._pumping: set[int] = set()  # groups
        self._queues: list[deque[Callable[[], None]]] = [deque() for _ in range(2 * self.groups)]
        self._free_at = [0.0] * (2 * self.groups)

    # threads

    @property
    def groups(self) -> int:
        return len(self.devices.nics)

    def post(self, thread: int, act: Callable[[], None], after_s: float = 0.0) -> None:
        """To the thread of a group, or (`groups` + its number) to the one that registers for it.
        Each takes what comes in order; that of a lone group is prompt, but for its fences."""
        if self.groups == 1 and not after_s:
            act()
        elif self.groups == 1:
            self.later(after_s, act)
        else:
            now = self.ether.kernel.now
            at = max(self._free_at[thread], now + after_s + self.ether.quick())
            self._free_at[thread] = at
            self._queues[thread].append(act)
            self.later(at - now, lambda: self._queues[thread].popleft()())

    # sessions

    def open_session(
        self, session: int, nics: Sequence[int], writable: Sequence[int], token: bytes
    ) -> None:
        if not self.alive:
            return
        late_s = self.reopening(session, nics) if session in self.sessions else 0.0
        found = self.sessions.setdefault(session, Session(session, token))
        found.opening += len(nics)
        for group, members in enumerate(self.devices.nics):
            if on := [nic for nic in nics if nic in members]:
                part = found.parts.setdefault(group, Part())
                regions = tuple(
                    region for region in writable
                    if self.homes[region] == group or (region, group) in found.carried
                )  # fmt: skip
                self.post(
                    group,
                    lambda group=group, part=part, on=on, regions=regions: self._open(  # type: ignore[misc]
                        found, group, part, on, regions, late_s
                    ),
                )

    def _open(
        self,
        found: Session,
        group: int,
        part: Part,
        on: list[int],
        regions: tuple[int, ...],
        late_s: float,
    ) -> None:
        if part.fences:
            part.waiting.append(lambda: self._open(found, group, part, on, regions, late_s))
            return
        part.writable = regions

        def install() -> None:
            if not self._holds(found, part):
                return
            for nic in on:
                if nic not in part.registered:
                    for old in found.descriptors.values():
                        old.pop(nic, None)
                    self._register(found, part, nic, (SCRATCH, *regions))
            found.opening -= len(on)
            if not found.opening:
                self.say(Event("opened", found.number))

        self.post(self.groups + group, install, late_s)

    def _register(self, found: Session, part: Part, nic: int, regions: Iterable[int]) -> None:
        for region in regions:
            key = self.ether.new_key()
            part.registered.setdefault(nic, {})[region] = key
            found.descriptors.setdefault(region, {})[nic] = key

    def _holds(self, found: Session, part: Part) -> bool:
        return self.sessions.get(found.number) is found and not part.closed

    def descriptors(self, session: int) -> list[tuple[int, list[tuple[int, int, int, int, int]]]]:
        found = self.sessions.get(session)
        if found is None:
            raise FabricError("descriptors: no such session")
        size = self.geometry.region_bytes
        return [
            (region, [(nic, 0, size if region >= 0 else 4096, 0, key) for nic, key in keys.items()])
            for region, keys in sorted(found.descriptors.items())
            if keys
        ]

    def registered(self, session: int, nic: int) -> dict[int, int]:
        """Regions that this peer may write to over this NIC now, with their keys."""
        found = self.sessions.get(session)
        part = found.parts.get(self.group_of[nic]) if found is not None else None
        return part.registered.get(nic, {}) if part is not None else {}

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

    def ranks_of(self, nic: int) -> list[int]:
        """Those whose memory it is for, of one of several groups; as daemon/transfer.py says."""
        mine = self.group_of[nic]
        return [rank for rank, home in enumerate(self.homes) if home == mine and self.groups > 1]

    def carry(self, session: int, region: int, group: int) -> None:
        if not self.alive:
            return
        found = self.sessions.get(session)
        if found is None:
            raise FabricError("carry: no such session")
        found.carried.add((region, group))
        part = found.parts[group]
        self.post(group, lambda: self._carry(found, group, part, region))

    def _carry(self, found: Session, group: int, part: Part, region: int) -> None:
        if not self._holds(found, part):
            return
        if region not in part.writable:
            part.writable += (region,)
        late_s, wrong = self.lending(group)
        on = list(part.registered)

        def install() -> None:
            if not self._holds(found, part):
                return
            for nic in on:
                here = part.registered.get(nic)
                if not wrong and here is not None and region not in here:
                    self._register(found, part, nic, [region])
            self.say(Event("carried", found.number, text=wrong))

        self.post(self.groups + group, install, late_s)

    def endpoint_name(self, session: int, nic: int) -> bytes:
        raise AssertionError("only FI_EP_RDM has names")

    def connect(self, session: int, pair: Pair, endpoint: bytes, deadline_s: float) -> None:
        if self.alive:
            self.ether.connect(self, self.sessions[session], pair, endpoint, deadline_s)

    def set_remote(
        self, session: int, regions: Sequence[tuple[int, Sequence[tuple[int, int, int, int, int]]]]
    ) -> None:
        if not self.alive:
            return
        found = self.sessions.get(session)
        if found is None:
            raise FabricError("set_remote: no such session")
        table = {rank: {piece[0]: piece[4] for piece in pieces} for rank, pieces in regions}
        for group, part in found.parts.items():
            self.post(group, lambda part=part: setattr(part, "remote", table))  # type: ignore[misc]

    def probe(self, session: int, answer: bool = False) -> None:
        found = self.sessions.get(session)
        if not self.alive or found is None:
            return
        for group in list(found.parts):
            self.post(group, lambda group=group: self._probe(found, group))  # type: ignore[misc]

    def _probe(self, found: Session, group: int) -> None:
        for at, connection in found.connections.items():
            if self.group_of[at[0]] == group:
                self.ether.probe(self, connection)

    def fence(self, session: int, pair: Pair | None = None) -> None:
        if not self.alive:
            return
        found = self.sessions.get(session)
        concerned: list[int] = []
        if found is not None:
            concerned = list(found.parts) if pair is None else [self.group_of[pair[0]]]
            for at, connection in found.connections.items():
                if not self.writable and pair in (None, at):
                    connection.closing = True
        if found is None or not concerned:
            after_s = self.ether.quick() + self.fence_late_s
            self.later(after_s, lambda: self.emit(Event("fenced", session, pair or WHOLE)))
            return
        left = set(concerned)
        for group in concerned:
            found.parts[group].fences += 1
            after_s = self.ether.quick() + self.fence_late_s
            self.post(
                group,
                lambda group=group: self.do_fence(found, pair or WHOLE, group, left),  # type: ignore[misc]
                after_s,
            )

    def do_fence(self, found: Session, pair: Pair, group: int, left: set[int]) -> None:
        """One group's share of a fence; `left`: groups that have theirs to do."""
        part = found.parts[group]
        part.fences -= 1
        if self._holds(found, part):
            self._close(found, part, pair, group)
        left.discard(group)
        if not left:
            if pair == WHOLE:
                self.sessions.pop(found.number, None)
            self.emit(Event("fenced", found.number, pair))
        if pair != WHOLE and not part.fences:
            waiting, part.waiting = part.waiting, []
            for act in waiting:
                act()

    def _close(self, found: Session, part: Part, pair: Pair, group: int) -> None:
        mine = [at for at in found.connections if self.group_of[at[0]] == group]
        for at in mine if pair == WHOLE else [pair]:
            connection = found.connections.pop(at, None)
            if connection is not None:
                self.ether.close(connection, self)
        used = {at[0] for at in found.connections}
        for nic in list(part.registered) if pair == WHOLE else [pair[0]]:
            if nic not in used:
                part.registered.pop(nic, None)
        if pair == WHOLE:
            part.closed = True
            self.part_closed(found, group)

    def say(self, event: Event) -> None:
        """From the progress thread, so not before the call that caused it has returned."""
        self.later(0.0, lambda: self.emit(event))

    def part_closed(self, found: Session, group: int) -> None:
        """What this group had to post for the session is void."""
        raise NotImplementedError


def device_homes(ranks: int, groups: int) -> tuple[int, ...]:
    """The device group of each rank, dealt in order: daemon/placement.py without a choice."""
    return tuple(rank * groups // ranks for rank in range(ranks))
