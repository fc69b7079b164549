"""The peer manager over the real transfer core: libfabric on loopback, WebSockets, one process."""

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdnode.api.peer import PeerDialer, PeerListener
from pdnode.config import Config, ModelConfig, NodeConfig, PeerConfig, PrefillConfig
from pdnode.core import wire
from pdnode.core.heartbeat import Counters
from pdnode.fabric._native import Event, Fabric
from pdnode.fabric.engine import FabricEngine
from pdnode.fabric.library import find_library
from pdnode.messenger.peer_link import Identity
from pdnode.messenger.peers import SESSION_EVENTS, PeerManager
from pdnode.types import NodeId, Role
from tests.support.link_nodes import GEOMETRY, Listener, hello, until
from tests.support.relay import Relay

PEER = PeerConfig(
    port=0,
    token=b"a peer token of the tests",
    heartbeat_s=0.1,
    link_lost_s=2.0,
    connect_timeout_s=5.0,
    reconnect_max_s=0.05,
)
SLOT, GENERATION = 5, 200
PROVIDERS = ("tcp", "tcp-rdm")


class RealNode:
    def __init__(self, provider: str, role: Role, prefill: tuple[PrefillConfig, ...] = ()) -> None:
        fabric = Fabric(str(find_library("auto", provider)), provider, "adaptive")
        self.fabric = fabric
        self.engine = FabricEngine(fabric)
        fabric.add_group([("lo", "127.0.0.1")])
        endpoint = b""
        if role is Role.PREFILL and provider == "tcp":
            endpoint = f"127.0.0.1:{fabric.listen(0, '127.0.0.1', 0)}".encode()
        fd = os.memfd_create("kv")
        os.ftruncate(fd, GEOMETRY.region_bytes)
        self.memory = mmap.mmap(fd, GEOMETRY.region_bytes)
        self.region = fabric.add_region(0, fd, GEOMETRY.region_bytes, GEOMETRY.page_bytes)
        os.close(fd)
        self.listener = Listener()
        self.events: list[Event] = []
        self.dialer = PeerDialer(PEER)
        self.manager = PeerManager(
            Config(
                node=NodeConfig(id=NodeId(f"{role}-1"), role=role),
                model=ModelConfig(Path("."), "tiny"),
                peer=PEER,
                prefill=prefill,
            ),
            Identity(
                hello(role),
                (wire.NicAddress(0, "lo", endpoint),),
                {0: self.region} if role is Role.DECODE else {},
            ),
            fabric,
            self.listener,
            dial=self.dialer.dial,
            counters=lambda: Counters(0, False, fabric.statistics()["turns"], 0, 0),
        )
        self.server = PeerListener(PEER, self.manager.accept)
        self.engine.on(SESSION_EVENTS, self.manager.fabric_event)
        self.engine.on(("reached", "drained", "failed", "settled"), self.events.append)

    def has(self, kind: str) -> Callable[[], bool]:
        return lambda: any(event.kind == kind for event in self.events)

    async def stop(self) -> None:
        assert await self.manager.close() == []
        await self.dialer.close()
        await self.server.stop()
        self.engine.close()
        self.memory.close()


@asynccontextmanager
async def two(provider: str) -> AsyncIterator[tuple[RealNode, RealNode, Relay]]:
    """(decode, prefill, relay between their sockets), both up."""
    prefill = RealNode(provider, Role.PREFILL)
    _, port = await prefill.server.start()
    relay = Relay(port)
    await relay.start()
    decode = RealNode(provider, Role.DECODE, (PrefillConfig("p0", "127.0.0.1", relay.port),))
    for node in (decode, prefill):
        node.engine.start(asyncio.get_running_loop())
    decode.manager.start()
    await until(lambda: decode.listener.sessions and prefill.listener.sessions)
    try:
        yield decode, prefill, relay
    finally:
        await decode.stop()
        await prefill.stop()
        await relay.stop()


def push(prefill: RealNode, transfer: int, spans: list[tuple[int, int, int]]) -> None:
    """All layers of some pages, over the last session."""
    session = prefill.listener.sessions[-1]
    layer, page = GEOMETRY.layer_stride, GEOMETRY.page_bytes
    prefill.fabric.open_transfer(transfer, session.session, SLOT << 20 | GENERATION << 12)
    prefill.fabric.submit(
        transfer=transfer,
        counter=-1,
        base=0,
        layers=GEOMETRY.layers,
        region=prefill.region,
        source_layer_stride=layer,
        source_page_stride=page,
        source_offset=0,
        remote_rank=session.regions[0],
        remote_layer_stride=layer,
        remote_page_stride=page,
        remote_offset=0,
        length=page,
        whole_page=True,
        spans=spans,
    )
    prefill.fabric.finish(transfer)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_pages_travel_over_a_session_that_is_up(provider: str) -> None:
    async with two(provider) as (decode, prefill, _):
        session = decode.listener.sessions[0]
        assert session.pairs == ((0, 0),)
        prefill.memory[:] = os.urandom(GEOMETRY.region_bytes)
        decode.fabric.arm(SLOT, GENERATION, session.session, 3 * GEOMETRY.layers)
        push(prefill, 1, [(0, 4, 2), (7, 1, 1)])
        await until(decode.has("reached"))
        await until(prefill.has("drained"))
        page = GEOMETRY.page_bytes
        for layer in range(GEOMETRY.layers):
            base = layer * GEOMETRY.layer_stride
            for source, target in ((0, 4), (1, 5), (7, 1)):
                written = decode.memory[base + target * page : base + (target + 1) * page]
                assert written == prefill.memory[base + source * page : base + (source + 1) * page]
        await until(lambda: session.last_heartbeat is not None and session.last_heartbeat.core > 0)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_twenty_reconnects_leave_no_descriptor_and_no_way_back(provider: str) -> None:
    async with two(provider) as (decode, prefill, relay):

        def descriptors() -> int:
            return len(list(Path("/proc/self/fd").iterdir()))

        base = descriptors()
        for turn in range(2, 22):
            relay.cut()
            await until(
                lambda turn=turn: all(  # type: ignore[misc]
                    len(node.listener.sessions) >= turn for node in (decode, prefill)
                )
            )
        await until(lambda: descriptors() <= base)
        for node in (decode, prefill):
            assert node.listener.kinds().count("fenced") == 20
            assert node.fabric.statistics()["sessions"] == 1
            assert node.fabric.statistics()["connections"] == 1
        session = decode.listener.sessions[-1]
        decode.fabric.arm(SLOT, GENERATION, session.session, GEOMETRY.layers)
        push(prefill, 1, [(0, 0, 1)])
        await until(decode.has("reached"))


async def test_a_connection_that_dies_under_a_living_link_ends_the_session() -> None:
    async with two("tcp") as (decode, prefill, _):
        session = prefill.listener.sessions[0]
        prefill.fabric.fence(session.session, (0, 0))
        await until(lambda: len(decode.listener.sessions) == len(prefill.listener.sessions) == 2)
        assert prefill.listener.kinds()[1:4] == ["pair_fenced", "lost", "fenced"]
        assert decode.listener.kinds().count("fenced") == 1


async def test_a_provider_without_answer_is_refused_by_the_deadline() -> None:
    """The prefill node's fabric port is closed: connecting fails, and says so."""
    async with two("tcp") as (decode, prefill, relay):
        identity = prefill.manager._identity
        nowhere = wire.NicAddress(0, "lo", b"127.0.0.1:1")
        prefill.manager._identity = Identity(identity.hello, (nowhere,), {})
        relay.cut()
        await until(lambda: "NIC pair (0, 0)" in decode.manager.status()[0].last_error)
        assert decode.manager.status()[0].state == "lost"
        prefill.manager._identity = identity
        await until(lambda: len(decode.listener.sessions) == 2)
