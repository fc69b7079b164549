"""What strangers, and peers that do not read, may do to the peer listener: nothing that lasts."""

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from pdnode.api import peer as peer_module
from pdnode.api.peer import LINK_PATH, LinkSocket, PeerDialer, PeerListener
from pdnode.config import PrefillConfig
from pdnode.core import wire
from pdnode.types import Role
from tests.support.fake_fabric import Switch
from tests.support.link_nodes import FAST, Node, hello, until

UPGRADE = (
    f"GET {LINK_PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
).encode()


CLOSED = (ConnectionError, asyncio.IncompleteReadError)


@pytest.fixture
async def prefill(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Node]:
    """A prefill node that a good peer can still use at the end, without a trace in its log."""
    switch = Switch()
    node = Node(switch, Role.PREFILL, peer=replace(FAST, connect_timeout_s=0.3))
    await node.start()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    yield node
    await until(lambda: not node.manager._links)
    await until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors)
    table = (PrefillConfig("p0", "127.0.0.1", node.port),)
    good = Node(switch, Role.DECODE, prefill=table)
    await good.start()
    await until(lambda: good.listener.sessions and node.listener.sessions)
    await good.stop()
    await node.stop()
    assert [record.exc_info for record in caplog.records if record.exc_info] == []


async def rejected(caplog: pytest.LogCaptureFixture, cause: str) -> None:
    """The node has logged this end of a link with a stranger."""

    def causes() -> list[str]:
        return [str(getattr(record, "fields", {}).get("cause", "")) for record in caplog.records]

    await until(lambda: any(cause in one for one in causes()))


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (b"\x00" * 1000, "bad frame: "),
        (os.urandom(64), "bad frame: "),
        (b"", "bad frame: "),
        ("text", "a text frame; only binary ones are taken"),
        (b"x" * wire.MAX_FRAME_BYTES, "bad frame: "),
        (b"x" * (wire.MAX_FRAME_BYTES + 1), "broken WebSocket frame: "),
        (wire.encode(hello(Role.DECODE)), "hello from a decode node is not taken in the step auth"),
        (wire.encode(wire.Bye("\x1b[31mred")), "closed by the peer: [31mred"),
    ],
    ids=["zeros", "random", "empty", "text", "large", "too-large", "hello", "bye"],
)
async def test_a_bad_frame_closes_the_link_with_a_cause(
    prefill: Node, caplog: pytest.LogCaptureFixture, message: bytes | str, cause: str
) -> None:
    url = f"http://127.0.0.1:{prefill.port}{LINK_PATH}"
    async with aiohttp.ClientSession() as session, session.ws_connect(url) as ws:
        with contextlib.suppress(ConnectionError):  # thrown out before all was sent
            if isinstance(message, str):
                await ws.send_str(message)
            else:
                await ws.send_bytes(message)
        async with asyncio.timeout(5):
            while not (await ws.receive()).type & 0x100:  # CLOSE, CLOSING, CLOSED, ERROR
                pass
    await rejected(caplog, cause)
    assert prefill.fabric.calls == []
    assert prefill.manager.status() == []


@pytest.mark.parametrize(
    ("data", "hang_up"),
    [
        (b"", False),
        (b"GET / HT", False),
        (os.urandom(4096), False),
        (b"GET /peer/v1/link HTTP/1.1\r\nX: " + b"y" * 100_000, False),
        (b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n", False),
        (b"GET /peer/v1/link HTTP/1.1\r\nHost: x\r\n\r\n", False),
        (UPGRADE, False),
        (UPGRADE, True),
        (UPGRADE + b"\x82\xfe\x10", False),  # half a frame header
        (UPGRADE + b"\x82\xfe\x10\x00abcdsome", True),  # 4,096 bytes announced, four sent
        (UPGRADE + b"\xff" * 64, False),  # reserved bits and op codes
        (UPGRADE + b"\x82\xff" + struct.pack(">Q", 1 << 40) + b"abcd", False),
    ],
)
async def test_raw_bytes_hold_a_connection_for_no_longer_than_the_deadline(
    prefill: Node, data: bytes, hang_up: bool
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", prefill.port)
    writer.write(data)
    if hang_up:
        await writer.drain()
        writer.transport.abort()
    else:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                while await reader.read(65536):
                    pass
    writer.close()


async def test_strangers_are_capped_and_do_not_count_once_proved(
    prefill: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "MAX_UNPROVED", 3)
    good = Node(
        prefill.fabric._switch,
        Role.DECODE,
        node="good",
        prefill=(PrefillConfig("p0", "127.0.0.1", prefill.port),),
    )
    await good.start()
    await until(lambda: good.listener.sessions)
    held = [await asyncio.open_connection("127.0.0.1", prefill.port) for _ in range(3)]
    await until(lambda: len(prefill.server._runner.server.connections) == 4)
    reader, writer = await asyncio.open_connection("127.0.0.1", prefill.port)
    with pytest.raises(CLOSED):
        await reader.readexactly(1)
    assert prefill.server.turned_away == 1
    assert good.listener.sessions[0].up
    # Those that say nothing are thrown out, which makes room.
    for reader_held, writer_held in held:
        async with asyncio.timeout(5):
            with pytest.raises(CLOSED):
                await reader_held.readexactly(1)
        writer_held.close()
    writer.close()
    assert prefill.server.turned_away == 4
    await good.stop()


async def linked() -> tuple[PeerListener, PeerDialer, LinkSocket, LinkSocket, asyncio.Event]:
    """Two sockets of one link; the listener's side lives until the event is set."""
    arrived: asyncio.Future[LinkSocket] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def accept(link: LinkSocket) -> None:
        link.proved()
        arrived.set_result(link)
        await done.wait()

    server = PeerListener(FAST, accept)
    _, port = await server.start()
    dialer = PeerDialer(FAST)
    near = await dialer.dial("127.0.0.1", port)
    return server, dialer, near, await arrived, done


async def test_a_peer_that_does_not_read_loses_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    server, dialer, near, far, done = await linked()
    monkeypatch.setattr(peer_module, "MAX_OUTBOX_FRAMES", 16)
    chunk = b"x" * (1 << 20)
    sent = 0
    while not near.cause:
        near.send(chunk)
        sent += 1
        assert sent < 200, "the outbox grows without end"
        await asyncio.sleep(0)
    assert near.cause.startswith("outbox full: 16 frames of 16777216 bytes wait")
    near.send(b"dropped")
    assert await near.receive() is None
    async with asyncio.timeout(5):
        await near.wait_closed()
        while await far.receive() is not None:
            pass
    done.set()
    await dialer.close()
    await server.stop()


async def test_the_outbox_is_bounded_in_bytes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    server, dialer, near, _, done = await linked()
    monkeypatch.setattr(peer_module, "MAX_OUTBOX_BYTES", 100)
    near.send(b"x" * 60)
    near.send(b"x" * 60)
    assert "60 bytes wait, at most 2048 and 100 may" in near.cause
    done.set()
    await near.wait_closed()
    await dialer.close()
    await server.stop()


async def test_closing_is_bounded_when_the_peer_is_frozen() -> None:
    server, dialer, near, _, done = await linked()
    for _ in range(16):
        near.send(b"x" * (1 << 20))  # more than the socket buffers take
    loop = asyncio.get_running_loop()
    begun = loop.time()
    near.close("enough")
    await near.wait_closed()
    assert loop.time() - begun < peer_module.CLOSE_S + 1.0
    assert await near.receive() is None
    done.set()
    await dialer.close()
    await server.stop()


async def test_what_is_queued_is_sent_before_the_close_and_the_reason_arrives() -> None:
    server, dialer, near, far, done = await linked()
    near.send(b"one")
    near.send(b"two")
    near.close("reason " + "ü" * 200)  # a close frame takes 123 bytes of it
    assert [await far.receive(), await far.receive(), await far.receive()] == [b"one", b"two", None]
    assert far.cause.startswith("closed by the peer: reason üüü")
    done.set()
    await near.wait_closed()
    await dialer.close()
    await server.stop()


async def test_a_taken_port_is_an_os_error() -> None:
    async def accept(link: LinkSocket) -> None: ...

    first = PeerListener(FAST, accept)
    _, port = await first.start()
    second = PeerListener(replace(FAST, port=port), accept)
    with pytest.raises(OSError, match="address already in use"):
        await second.start()
    await first.stop()


async def test_a_node_that_shuts_down_takes_no_links(prefill: Node) -> None:
    other = Node(Switch(), Role.PREFILL)
    await other.start()
    await other.manager.close()
    dialer = PeerDialer(FAST)
    near = await dialer.dial("127.0.0.1", other.port)
    assert await near.receive() is None
    assert near.cause == "closed by the peer: shutting down"
    near.close("")
    await near.wait_closed()
    await dialer.close()
    await other.stop()


@pytest.mark.parametrize("side", [Role.DECODE, Role.PREFILL])
async def test_a_fault_of_this_program_is_reported_and_fences(
    side: Role, caplog: pytest.LogCaptureFixture
) -> None:
    """On either side, since the node may have to end for it; else the next link is made."""
    switch = Switch()
    prefill = Node(switch, Role.PREFILL)
    await prefill.start()
    table = (PrefillConfig("p0", "127.0.0.1", prefill.port),)
    decode = Node(switch, Role.DECODE, prefill=table)
    here, there = (decode, prefill) if side is Role.DECODE else (prefill, decode)
    faults: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context))

    def broken(session: object, frame: wire.Frame) -> None:
        raise AssertionError("a fault of the messenger")

    here.listener.session_frame = broken  # type: ignore[assignment, method-assign]
    await decode.start()
    await until(lambda: here.listener.sessions)
    there.manager.drain(True)
    await until(lambda: "fenced" in here.listener.kinds())
    there.manager.drain(False)
    message = "a peer connector failed" if side is Role.DECODE else "a peer link failed"
    assert {context["message"] for context in faults} == {message}
    assert str(faults[0]["exception"]) == "a fault of the messenger"
    assert "stopped on this node" in str(here.listener.log)
    assert [record for record in caplog.records if record.exc_info] == []
    await until(lambda: len(here.listener.sessions) > len(faults))
    await decode.stop()
    await prefill.stop()


async def test_a_dial_that_fails_as_nobody_foresaw_is_tried_again() -> None:
    switch = Switch()
    prefill = Node(switch, Role.PREFILL)
    await prefill.start()
    decode = Node(switch, Role.DECODE, prefill=(PrefillConfig("p0", "127.0.0.1", prefill.port),))
    faults: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))
    odd: list[Exception] = [UnicodeError("label empty or too long"), KeyError("x")]

    async def dial(host: str, port: int) -> LinkSocket:
        if odd:
            raise odd.pop()
        return await decode.dialer.dial(host, port)

    decode.manager._dial = dial
    await decode.start()
    await until(lambda: decode.listener.sessions)
    assert [type(fault) for fault in faults] == [KeyError, UnicodeError]
    await decode.stop()
    await prefill.stop()
