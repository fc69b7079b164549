"""A fabric without bytes: records every call, answers with the events that the real one would send.

All fabrics of one `Switch` can connect to each other. Events go to `sink` in a later loop turn, as
from the real event queue. `hold` names event kinds that are kept back.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdnode.fabric._native import FabricError

Pair = tuple[int, int]
Piece = tuple[int, int, int, int, int]
WHOLE = (-1, -1)


@dataclass(frozen=True, slots=True)
class FakeEvent:
    kind: str
    session: int
    pair: Pair = WHOLE
    text: str = ""


@dataclass(slots=True, eq=False)
class FakeSession:
    number: int
    token: bytes
    nics: list[int]
    writable: list[int]
    pairs: dict[Pair, "tuple[FakeFabric, FakeSession]"] = field(default_factory=dict)
    remote: list[tuple[int, list[Piece]]] = field(default_factory=list)
    probing: bool = False


class Switch:
    def __init__(self) -> None:
        self.listeners: dict[bytes, tuple[FakeFabric, int]] = {}


class FakeFabric:
    def __init__(self, switch: Switch, *, region_bytes: int, rdm: bool = False) -> None:
        self.limits: dict[str, int | str | bool] = {"endpoint": "rdm" if rdm else "msg"}
        self.calls: list[tuple[object, ...]] = []
        self.sessions: dict[int, FakeSession] = {}
        self.hold: set[str] = set()
        self.refuse: set[str] = set()  # names of calls that raise FabricError
        self.sink: Callable[[FakeEvent], None] = lambda event: None
        self._switch = switch
        self._region_bytes = region_bytes

    def listen(self, nic: int) -> bytes:
        endpoint = f"fabric-{id(self)}:{nic}".encode()
        self._switch.listeners[endpoint] = (self, nic)
        return endpoint

    def names(self, session: int | None = None) -> list[object]:
        return [call[0] for call in self.calls if session is None or call[1] == session]

    # the interface

    def open_session(
        self, session: int, nics: Sequence[int], writable: Sequence[int], token: bytes
    ) -> None:
        self._called("open_session", session, tuple(nics), tuple(writable), token)
        assert session not in self.sessions
        self.sessions[session] = FakeSession(session, token, list(nics), list(writable))
        self._post(FakeEvent("opened", session))

    def descriptors(self, session: int) -> list[tuple[int, list[Piece]]]:
        self._called("descriptors", session)
        opened = self.sessions[session]
        sizes = {-1: 4096, **dict.fromkeys(opened.writable, self._region_bytes)}
        return [
            (region, [(nic, 0, size, 0, 1000 * session + nic) for nic in opened.nics])
            for region, size in sizes.items()
        ]

    def carry(self, session: int, region: int, group: int) -> None:
        raise AssertionError("one device group reaches all memory")

    def endpoint_name(self, session: int, nic: int) -> bytes:
        self._called("endpoint_name", session, nic)
        return self.listen(nic)

    def connect(self, session: int, pair: Pair, endpoint: bytes, deadline_s: float) -> None:
        self._called("connect", session, pair, endpoint, deadline_s)
        mine = self.sessions[session]
        found = self._switch.listeners.get(endpoint)
        theirs = found and next(
            (other for other in found[0].sessions.values() if other.token == mine.token), None
        )
        if not found or not theirs or found[1] != pair[1]:
            self._post(FakeEvent("lost", session, pair, "rejected"))
            return
        mine.pairs[pair] = (found[0], theirs)
        self._post(FakeEvent("connected", session, pair))
        if self.limits["endpoint"] == "msg":
            theirs.pairs[pair[1], pair[0]] = (self, mine)
            found[0]._post(FakeEvent("connected", theirs.number, (pair[1], pair[0])))

    def set_remote(self, session: int, regions: Sequence[tuple[int, Sequence[Piece]]]) -> None:
        self._called("set_remote", session, regions)
        remote = [(rank, list(pieces)) for rank, pieces in regions]
        self.sessions[session].remote = remote

    def probe(self, session: int, answer: bool = False) -> None:
        self._called("probe", session)
        mine = self.sessions[session]
        assert mine.remote, "a probe needs the peer's scratch region"
        mine.probing = True
        for pair, (fabric, theirs) in mine.pairs.items():
            if theirs.probing:
                self._post(FakeEvent("probed", session, pair))
                fabric._post(FakeEvent("probed", theirs.number, (pair[1], pair[0])))

    def fence(self, session: int, pair: Pair | None = None) -> None:
        self._called("fence", session, pair)
        mine = self.sessions.get(session)
        for cut in list(mine.pairs) if mine and pair is None else [pair] if pair else []:
            self.cut(session, cut, tell_here=False)
        if pair is None:
            self.sessions.pop(session, None)
        self._post(FakeEvent("fenced", session, pair or WHOLE))

    # faults

    def cut(self, session: int, pair: Pair, *, tell_here: bool = True) -> None:
        """The connection dies."""
        mine = self.sessions[session]
        if pair not in mine.pairs:
            return
        fabric, theirs = mine.pairs.pop(pair)
        if theirs.pairs.pop((pair[1], pair[0]), None) is not None:
            fabric._post(FakeEvent("lost", theirs.number, (pair[1], pair[0]), "connection died"))
        if tell_here:
            self._post(FakeEvent("lost", session, pair, "connection died"))

    def _called(self, name: str, *arguments: object) -> None:
        self.calls.append((name, *arguments))
        if name in self.refuse:
            raise FabricError(f"{name}: refused by the test")

    def _post(self, event: FakeEvent) -> None:
        if event.kind not in self.hold:
            asyncio.get_running_loop().call_soon(lambda: self.sink(event))
