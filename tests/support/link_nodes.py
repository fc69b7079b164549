"""Small nodes for tests of the peer link: hellos, and whole nodes with a fake fabric."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from pdnode.api.peer import PeerDialer, PeerListener
from pdnode.config import Config, ModelConfig, NodeConfig, PeerConfig, PrefillConfig
from pdnode.core import wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.heartbeat import Counters
from pdnode.core.hello import wire_geometry
from pdnode.messenger.peer_link import Identity
from pdnode.messenger.peers import PeerManager
from pdnode.messenger.session import PeerSession
from pdnode.types import NodeId, Role
from tests.support.fake_fabric import FakeFabric, Switch

GEOMETRY = KvGeometry("gqa", 2, 4, 8, 16, "float32", tp=1, pages=10)
TOKEN = b"a peer token of the tests"
FAST = PeerConfig(
    port=0,
    token=TOKEN,
    heartbeat_s=0.05,
    link_lost_s=0.5,
    connect_timeout_s=2.0,
    reconnect_max_s=0.05,
    max_peers=4,
)


def hello(role: Role, node: str = "", **changes: object) -> wire.Hello:
    base = wire.Hello(
        node=node or f"{role}-1",
        boot=f"{'d' if role is Role.DECODE else 'e'}" * 32,
        role=role,
        protocol_min=wire.PROTOCOL_MIN,
        protocol_max=wire.PROTOCOL_MAX,
        pdnode_version="0.1.0",
        model="tiny",
        fingerprint="f" * 64,
        geometry=wire_geometry(GEOMETRY),
        context_tokens=128,
        provider="tcp",
        libfabric="2.5.1",
    )
    return msgspec.structs.replace(base, **changes)


class Listener:
    """Writes down what the messenger would hear."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.sessions: list[PeerSession] = []
        self.changed = asyncio.Event()

    def _note(self, *entry: object) -> None:
        self.log.append(entry)
        self.changed.set()

    def session_up(self, session: PeerSession) -> None:
        self.sessions.append(session)
        self._note("up", session.session)

    def session_frame(self, session: PeerSession, frame: wire.Frame) -> None:
        self._note("frame", session.session, frame)

    def session_lost(self, session: PeerSession, cause: str, *, silent: bool) -> None:
        self._note("lost", session.session, cause)

    def session_fenced(self, session: PeerSession) -> None:
        self._note("fenced", session.session)

    def pair_lost(self, session: PeerSession, pair: tuple[int, int], cause: str) -> None:
        self._note("pair_lost", session.session, pair)

    def pair_up(self, session: PeerSession, pair: tuple[int, int]) -> None:
        self._note("pair_up", session.session, pair)

    def pair_fenced(self, session: PeerSession, pair: tuple[int, int]) -> None:
        self._note("pair_fenced", session.session, pair)

    def kinds(self) -> list[object]:
        return [entry[0] for entry in self.log]


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Waits for something that no event tells of."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


class Node:
    """A node as far as its peers see it."""

    def __init__(
        self,
        switch: Switch,
        role: Role,
        *,
        node: str = "",
        peer: PeerConfig = FAST,
        prefill: tuple[PrefillConfig, ...] = (),
        nics: tuple[int, ...] = (0,),
        rdm: bool = False,
        greeting: wire.Hello | None = None,
    ) -> None:
        self.listener = Listener()
        self.fabric = FakeFabric(switch, region_bytes=GEOMETRY.region_bytes, rdm=rdm)
        self.counters = Counters(0, False, 0, 0, GEOMETRY.pages)
        said = greeting or hello(role, node)
        self.config = Config(
            node=NodeConfig(id=NodeId(said.node), role=role),
            model=ModelConfig(Path("."), "tiny"),
            peer=peer,
            prefill=prefill,
        )
        accepts = role is Role.PREFILL and not rdm
        identity = Identity(
            said,
            tuple(
                wire.NicAddress(nic, f"nic{nic}", self.fabric.listen(nic) if accepts else b"")
                for nic in nics
            ),
            {0: 7} if role is Role.DECODE else {},
        )
        self.dialer = PeerDialer(peer)
        self.manager = PeerManager(
            self.config,
            identity,
            self.fabric,
            self.listener,
            dial=self.dialer.dial,
            counters=lambda: self.counters,
            jitter=lambda: 0.0,
        )
        self.fabric.sink = self.manager.fabric_event
        self.server = PeerListener(peer, self.manager.accept)
        self.port = 0

    async def start(self) -> None:
        if self.config.node.role is Role.PREFILL:
            _, self.port = await self.server.start()
        self.manager.start()

    async def stop(self) -> None:
        assert await self.manager.close() == []
        await self.dialer.close()
        await self.server.stop()
