"""Nodes that go through the motions of a peer, with a real fabric, and send what they like."""

import asyncio
import dataclasses
import mmap
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec

from pdnode.api.peer import LINK_PATH, LinkSocket, PeerDialer, PeerListener
from pdnode.config import Config, ModelConfig, NodeConfig, PeerConfig, PrefillConfig
from pdnode.core import wire
from pdnode.core.auth import Party, Step, sign
from pdnode.core.geometry import KvGeometry
from pdnode.core.heartbeat import Counters
from pdnode.core.hello import read_geometry, wire_geometry
from pdnode.fabric._native import Fabric
from pdnode.fabric.engine import FabricEngine
from pdnode.fabric.library import find_library
from pdnode.messenger.peer_link import Identity
from pdnode.messenger.peers import SESSION_EVENTS, PeerManager
from pdnode.messenger.session import PeerSession
from pdnode.types import NodeId, Role
from tests.support.hostile_frames import HostileFrames
from tests.support.link_nodes import Listener

PAGES = 64
BURST = 64  # frames between two looks at what comes back
PAUSE_S = {Role.DECODE: 0.0, Role.PREFILL: 0.02}  # after a burst: for what it can lie about
POINTS: dict[Role, tuple[tuple[str, type[wire.Message] | None], ...]] = {
    # What this node has just said or heard; the other one is then in AUTH, PROOF, HELLO, OPENING,
    # ANSWER, CONNECT, PROBE,
    Role.DECODE: (
        ("open", None),
        ("heard", wire.AuthReply),
        ("said", wire.AuthProof),
        ("heard", wire.Hello),
        ("heard", wire.SessionOffer),
        ("said", wire.SessionAnswer),
        ("heard", wire.SessionReady),
    ),
    # and here in AUTH, HELLO (before and after its proof), OFFER, OPENING, CONNECT, PROBE.
    Role.PREFILL: (
        ("open", None),
        ("said", wire.AuthReply),
        ("heard", wire.AuthProof),
        ("said", wire.Hello),
        ("said", wire.SessionOffer),
        ("heard", wire.SessionAnswer),
        ("said", wire.SessionReady),
    ),
}
UP = ("up", None)


async def hello_of(port: int, token: bytes) -> wire.Hello:
    """What the prefill node behind this port says of itself."""
    url = f"http://127.0.0.1:{port}{LINK_PATH}"
    async with aiohttp.ClientSession() as session, session.ws_connect(url) as ws:
        me = Party("who-are-you", Role.DECODE, os.urandom(wire.NONCE_BYTES))
        await ws.send_bytes(wire.encode(wire.Auth(*me)))
        reply = wire.decode(await ws.receive_bytes())
        assert isinstance(reply, wire.AuthReply)
        there = Party(reply.node, reply.role, reply.nonce)
        proof = sign(token, Step.PROOF, dialer=me, acceptor=there)
        await ws.send_bytes(wire.encode(wire.AuthProof(proof)))
        unknown = wire.Geometry("gqa", 1, 1, 1, 1, "float32", 1, 1)
        mine = wire.Hello(me.node, "b", me.role, 1, 1, "0", "m", "f", unknown, 1, "tcp", "2")
        await ws.send_bytes(wire.encode(mine))
        found = wire.decode(await ws.receive_bytes())
        assert isinstance(found, wire.Hello)
        return found


class HostileSocket:
    """A `Transport` that tells what passes, and through which more can be thrown."""

    def __init__(
        self, inner: LinkSocket, passed: Callable[["HostileSocket", str, bytes], None]
    ) -> None:
        self.inner = inner
        self._passed = passed
        passed(self, "open", b"")

    @property
    def cause(self) -> str:
        return self.inner.cause

    @property
    def address(self) -> str:
        return self.inner.address

    def send(self, data: bytes) -> None:
        self.inner.send(data)
        self._passed(self, "said", data)

    async def receive(self) -> bytes | None:
        data = await self.inner.receive()
        if data is not None:
            self._passed(self, "heard", data)
        return data

    def proved(self) -> None:
        self.inner.proved()

    def close(self, text: str) -> None:
        self.inner.close(text)

    async def wait_closed(self) -> None:
        await self.inner.wait_closed()

    @property
    def queued(self) -> int:
        return len(self.inner._outbox)


class HostileNode:
    """Runs the product's own link machine and fabric as `like` would, and fuzzes at one point of
    each link in turn: frames of any kind in the handshake, lies and then any frame when up.
    `up_frames`: thrown into a session that is up before one that ends it. `port`: of the link, of
    the prefill node to dial or, in that role, to listen on.
    """

    def __init__(
        self,
        role: Role,
        like: wire.Hello,
        *,
        name: str,
        token: bytes,
        up_frames: int,
        port: int,
    ) -> None:
        geometry = read_geometry(like.geometry, like.geometry)
        assert isinstance(geometry, KvGeometry)
        geometry = dataclasses.replace(geometry, pages=PAGES)
        self.role = role
        self.thrown: Counter[str] = Counter()  # frames by point
        self.heard: Counter[str] = Counter()  # frames by kind
        self.faults: list[str] = []  # what the other side may not send
        self.name = name
        self._up_frames = up_frames
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._point: dict[HostileSocket, tuple[str, type[wire.Message] | None]] = {}
        boot = os.urandom(16).hex()
        self._hello = msgspec.structs.replace(
            like, node=name, boot=boot, role=role, geometry=wire_geometry(geometry)
        )
        self._frames = HostileFrames(role, boot=boot, pages=PAGES, seed=name)
        peer = PeerConfig(
            port=port, token=token, heartbeat_s=0.2, reconnect_max_s=0.01, link_lost_s=5.0
        )
        fabric = Fabric(str(find_library("auto", "tcp")), "tcp", "adaptive")
        self._engine = FabricEngine(fabric)
        fabric.add_group([("lo", "127.0.0.1")])
        endpoint = b""
        if role is Role.PREFILL:
            endpoint = f"127.0.0.1:{fabric.listen(0, '127.0.0.1', 0)}".encode()
        fd = os.memfd_create("kv")
        os.ftruncate(fd, geometry.region_bytes)
        self.memory = mmap.mmap(fd, geometry.region_bytes)
        region = fabric.add_region(0, fd, geometry.region_bytes, geometry.page_bytes)
        os.close(fd)
        self._listener = _Listener(self._up, self._frame)
        self._dialer = PeerDialer(peer)
        tables = (PrefillConfig("p", "127.0.0.1", port),) if role is Role.DECODE else ()
        self._manager = PeerManager(
            Config(
                node=NodeConfig(id=NodeId(name), role=role),
                model=ModelConfig(Path("."), "any"),
                peer=peer,
                prefill=tables,
            ),
            Identity(
                self._hello,
                (wire.NicAddress(0, "lo", endpoint),),
                {0: region} if role is Role.DECODE else {},
            ),
            fabric,
            self._listener,
            dial=self._dial,
            counters=lambda: Counters(0, False, fabric.statistics()["turns"], 0, PAGES),
        )
        self._server = PeerListener(peer, self._accept)
        self._engine.on(SESSION_EVENTS, self._manager.fabric_event)

    async def start(self) -> None:
        if self.role is Role.PREFILL:
            await self._server.start()
        self._engine.start(asyncio.get_running_loop())
        self._manager.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert await self._manager.close() == []
        await self._dialer.close()
        await self._server.stop()
        self._engine.close()
        self.memory.close()

    async def _dial(self, host: str, port: int) -> HostileSocket:
        return HostileSocket(await self._dialer.dial(host, port), self._passed)

    async def _accept(self, link: LinkSocket) -> None:
        await self._manager.accept(HostileSocket(link, self._passed))

    def _passed(self, socket: HostileSocket, way: str, data: bytes) -> None:
        if way == "open":
            points = POINTS[self.role]
            # Every second link comes up.
            self._turn += 1
            self._point[socket] = UP if self._turn % 2 else points[self._turn // 2 % len(points)]
        try:
            frame = wire.decode(data) if data else None
        except wire.WireError as error:
            self.faults.append(f"{data[:40]!r}: {error}")
            return
        kind = None if frame is None else type(frame)
        if way == "heard" and kind is not None:
            self.heard[kind.__name__] += 1
        if way == "heard" and isinstance(frame, wire.Hello) and self.role is Role.PREFILL:
            self._frames.decode_boot = frame.boot
        if isinstance(frame, wire.SessionOffer):
            self._frames.session_token = frame.token
        if self._point.get(socket) == (way, kind):
            del self._point[socket]
            name = kind.__name__ if kind is not None else way
            for _ in range(4):
                self._throw(socket, self._frames.any(), name)

    def _throw(self, socket: HostileSocket, data: bytes, point: str) -> None:
        self.thrown[point] += 1
        socket.inner.send(data)

    def _up(self, session: PeerSession) -> None:
        socket = session.outbox._transport
        if self._point.pop(socket, None) == UP:
            task = asyncio.create_task(self._fuzz(session, socket))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _fuzz(self, session: PeerSession, socket: HostileSocket) -> None:
        left = self._up_frames
        while left > 0 and session.up:
            for _ in range(min(BURST, left)):
                self._throw(socket, self._frames.harmless(), "up")
            left -= BURST
            while socket.queued and session.up:
                await asyncio.sleep(0.001)
            await asyncio.sleep(PAUSE_S[self.role])
        while session.up:
            self._throw(socket, self._frames.any(), "up")
            await asyncio.sleep(0.002)

    def _frame(self, frame: wire.Frame) -> None:
        """A dispatch that this prefill node has got: something to lie about."""
        if isinstance(frame, wire.Dispatch):
            self._frames.keys.append(frame.key)


class _Listener(Listener):
    """Keeps no log: the sessions are many."""

    def __init__(
        self, up: Callable[[PeerSession], None], frame: Callable[[wire.Frame], None]
    ) -> None:
        super().__init__()
        self._up = up
        self._frame = frame

    def _note(self, *entry: object) -> None:
        pass

    def session_up(self, session: PeerSession) -> None:
        self._up(session)

    def session_frame(self, session: PeerSession, frame: wire.Frame) -> None:
        self._frame(frame)
