"""Two nodes over real WebSockets on loopback; the fabric is a recording fake."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pdnode.config import PeerConfig, PrefillConfig
from pdnode.core import wire
from pdnode.core.hello import wire_geometry
from pdnode.messenger.peers import PeerManager
from pdnode.peertls import load_tls
from pdnode.types import Role
from tests.support.certificates import Authority
from tests.support.fake_fabric import Switch
from tests.support.link_nodes import FAST, GEOMETRY, Node, hello, until
from tests.support.relay import Relay

DECODE_BOOT = hello(Role.DECODE).boot


class Two:
    """A decode and a prefill node with a relay between them."""

    def __init__(self, decode: Node, prefill: Node, relay: Relay) -> None:
        self.decode = decode
        self.prefill = prefill
        self.relay = relay

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.decode, self.prefill

    async def up(self, sessions: int = 1) -> None:
        await until(lambda: all(len(node.listener.sessions) >= sessions for node in self.nodes))

    async def heard(self, kind: str, times: int = 1) -> None:
        await until(lambda: all(node.listener.kinds().count(kind) >= times for node in self.nodes))


@asynccontextmanager
async def two(
    *,
    decode_peer: PeerConfig = FAST,
    prefill_peer: PeerConfig = FAST,
    decode_nics: tuple[int, ...] = (0,),
    prefill_nics: tuple[int, ...] = (0,),
    greeting: wire.Hello | None = None,
    rdm: bool = False,
) -> AsyncIterator[Two]:
    switch = Switch()
    prefill = Node(switch, Role.PREFILL, peer=prefill_peer, nics=prefill_nics, rdm=rdm)
    await prefill.start()
    relay = Relay(prefill.port)
    await relay.start()
    decode = Node(
        switch,
        Role.DECODE,
        peer=decode_peer,
        prefill=(PrefillConfig("p0", "127.0.0.1", relay.port),),
        nics=decode_nics,
        greeting=greeting,
        rdm=rdm,
    )
    await decode.start()
    try:
        yield Two(decode, prefill, relay)
    finally:
        await decode.stop()
        await prefill.stop()
        await relay.stop()


def state(manager: PeerManager, index: int = 0) -> str:
    return manager.status()[index].state


def dispatch(number: int = 1) -> wire.Dispatch:
    key = f"{DECODE_BOOT}:{number}"
    return wire.Dispatch(key, "r", [1, 2], [wire.PageRun(3, 1)], 0, 1 << 20, -1, 5.0, 0)


# life


@pytest.mark.parametrize("rdm", [False, True])
async def test_a_session_comes_up_and_carries_frames_both_ways(rdm: bool) -> None:
    async with two(rdm=rdm) as both:
        await both.up()
        decode, prefill = both.nodes
        here, there = decode.listener.sessions[0], prefill.listener.sessions[0]
        assert (here.node, here.role, here.pairs) == ("prefill-1", Role.PREFILL, ((0, 0),))
        assert (there.node, there.role, there.geometry) == ("decode-1", Role.DECODE, GEOMETRY)
        assert here.regions == {}  # nothing to write to on a prefill node
        assert there.regions == {0: 0}
        assert decode.manager.usable_prefills() == [here]
        assert prefill.manager.usable_prefills() == []

        here.send(dispatch())
        await until(lambda: "frame" in prefill.listener.kinds())
        assert prefill.listener.log[-1] == ("frame", there.session, dispatch())
        there.send(wire.Accepted(dispatch().key, 2))
        await until(lambda: "frame" in decode.listener.kinds())
        assert decode.listener.log[-1] == ("frame", here.session, wire.Accepted(dispatch().key, 2))

        calls = decode.fabric.names(here.session)
        assert calls.index("connect") < calls.index("probe")
        assert calls.index("set_remote") < calls.index("probe")
        opened = next(call for call in decode.fabric.calls if call[0] == "open_session")
        assert opened[2:4] == ((0,), (7,))
        accepted = next(call for call in prefill.fabric.calls if call[0] == "open_session")
        assert accepted[2:4] == ((0,), ())
        assert opened[4] == accepted[4]  # the token of the connection data
        await until(lambda: here.rtt_s > 0 and there.rtt_s > 0)
        assert here.rtt_s < 1
        status = decode.manager.status()[0]
        assert (status.name, status.node, status.role) == ("p0", "prefill-1", "prefill")
        assert (status.state, status.last_error, status.rtt_s) == ("up", "", here.rtt_s)
        assert status.seen_s is not None
        assert 0 <= status.seen_s <= status.since_s + 0.1 < 10
        assert here.last_heartbeat is not None
        assert here.last_heartbeat.free_pages == GEOMETRY.pages


@pytest.mark.parametrize(
    ("decode_nics", "prefill_nics", "pairs"),
    [
        ((0, 1), (0, 1, 2), {(0, 0), (1, 1), (0, 2)}),
        ((0, 1, 2), (4,), {(0, 4), (1, 4), (2, 4)}),
    ],
)
async def test_every_nic_of_both_sides_has_a_pair(
    decode_nics: tuple[int, ...], prefill_nics: tuple[int, ...], pairs: set[tuple[int, int]]
) -> None:
    async with two(decode_nics=decode_nics, prefill_nics=prefill_nics) as both:
        await both.up()
        assert set(both.decode.listener.sessions[0].pairs) == pairs
        turned = {(theirs, ours) for ours, theirs in both.prefill.listener.sessions[0].pairs}
        assert turned == pairs


async def test_a_lost_link_fences_both_sides_and_comes_back_as_a_new_session() -> None:
    async with two() as both:
        await both.up()
        for node in both.nodes:
            node.listener.log.clear()
        both.relay.cut()
        await both.up(2)
        for node in both.nodes:
            first, second = node.listener.sessions
            assert node.listener.kinds()[:3] == ["lost", "fenced", "up"]
            assert node.listener.log[1] == ("fenced", first.session)
            assert node.listener.log[2] == ("up", second.session)
            assert second.session > first.session
            assert (first.up, second.up) == (False, True)
            assert ("fence", first.session, None) in node.fabric.calls
            tokens = [call[4] for call in node.fabric.calls if call[0] == "open_session"]
            assert len(set(tokens)) == 2
            first.send(wire.Bye("of a session that is gone"))  # dropped silently
            assert state(node.manager) == "up"
            assert node.manager.warnings() == []
        assert both.decode.manager.usable_prefills() == [both.decode.listener.sessions[1]]


async def test_a_half_open_link_is_lost_on_both_sides_after_silence() -> None:
    async with two() as both:
        await both.up()
        for node in both.nodes:
            node.fabric.hold.add("lost")  # a frozen peer's connections do not die either
        both.relay.freeze()
        await both.heard("fenced")
        for node in both.nodes:
            session = node.listener.sessions[0].session
            assert node.listener.log[1] == ("lost", session, "silent for 0.5 s")
        both.relay.cut()
        await both.up(2)


async def test_a_lost_pair_leaves_the_session_until_the_last_one() -> None:
    async with two(decode_nics=(0, 1), prefill_nics=(0, 1)) as both:
        await both.up()
        here, there = (node.listener.sessions[0] for node in both.nodes)
        both.decode.fabric.cut(here.session, (1, 1))
        await both.heard("pair_lost")
        assert (here.pairs, there.pairs) == (((0, 0),), ((0, 0),))
        assert here.up
        assert there.up
        both.prefill.fabric.fence(there.session, (0, 0))
        await both.heard("fenced")
        assert both.prefill.listener.kinds()[2:5] == ["pair_fenced", "lost", "fenced"]
        assert both.decode.listener.kinds()[2] == "pair_lost"
        await both.up(2)
        assert len(both.decode.listener.sessions[1].pairs) == 2


async def test_drop_ends_a_session_for_a_cause_of_the_messenger() -> None:
    async with two() as both:
        await both.up()
        session = both.prefill.listener.sessions[0]
        both.prefill.manager.drop(session, "drained did not come")
        both.prefill.manager.drop(session, "a second time")
        await both.heard("fenced")
        assert both.prefill.listener.log[1] == ("lost", session.session, "drained did not come")
        # The dead connection and the bye travel on two ways: either may be the first to arrive.
        causes = "all NIC pairs are lost", "closed by the peer: drained did not come"
        lost = next(entry for entry in both.decode.listener.log if entry[0] == "lost")
        assert str(lost[2]).startswith(causes)


async def test_drain_is_told_and_ends_use() -> None:
    async with two() as both:
        await both.up()
        both.prefill.manager.drain(True)
        await until(lambda: both.decode.manager.usable_prefills() == [])
        assert state(both.decode.manager) == "drain"
        assert both.decode.listener.sessions[0].draining
        both.relay.cut()  # a new session hears of it as well
        await both.up(2)
        await until(lambda: state(both.decode.manager) == "drain")
        both.prefill.manager.drain(False)
        await until(lambda: both.decode.manager.usable_prefills() != [])


async def test_close_says_bye_and_fences() -> None:
    async with two() as both:
        await both.up()
        assert await both.prefill.manager.close() == []
        assert both.prefill.listener.kinds() == ["up", "lost", "fenced"]
        await until(lambda: "fenced" in both.decode.listener.kinds())
        count = both.relay.connections
        await until(lambda: both.relay.connections > count)  # the decode node goes on trying
        assert len(both.prefill.listener.sessions) == 1
        assert state(both.decode.manager) == "lost"
        code, text = both.decode.manager.warnings()[0]
        assert code == "W202"
        assert text.startswith("p0: lost: ")


@pytest.mark.parametrize("refused", [False, True])
async def test_an_unconfirmed_fence_is_told_and_nothing_is_freed(refused: bool) -> None:
    async with two(prefill_peer=replace(FAST, connect_timeout_s=0.3)) as both:
        await both.up()
        session = both.prefill.listener.sessions[0].session
        both.prefill.fabric.hold.add("fenced")
        if refused:
            both.prefill.fabric.refuse.add("fence")
        both.relay.cut()
        await until(lambda: "W205" in [code for code, _ in both.prefill.manager.warnings()])
        assert ("fenced", session) not in both.prefill.listener.log
        assert await both.prefill.manager.close(timeout_s=0.1) != []
        both.prefill.fabric.hold.clear()
        both.prefill.fabric.refuse.clear()
        both.prefill.fabric.fence(session)
        await until(lambda: ("fenced", session) in both.prefill.listener.log)
        for later in both.prefill.listener.sessions[1:]:
            both.prefill.fabric.fence(later.session)


async def test_a_hundred_reconnects_leak_nothing() -> None:
    async with two() as both:
        await both.up()

        def base() -> tuple[int, int]:
            return len(list(Path("/proc/self/fd").iterdir())), len(asyncio.all_tasks())

        await until(lambda: state(both.decode.manager) == "up")
        descriptors, tasks = base()
        for turn in range(2, 102):
            both.relay.cut()
            await both.up(turn)
        await until(lambda: base() <= (descriptors, tasks))
        for node in both.nodes:
            assert len(node.listener.sessions) == 101
            assert node.listener.kinds().count("fenced") == 100
            assert list(node.fabric.sessions) == [node.listener.sessions[-1].session]


# who may


async def test_another_token_is_refused_in_words_and_retried() -> None:
    async with two(decode_peer=replace(FAST, token=b"another token")) as both:
        await until(lambda: both.relay.connections >= 2)
        assert state(both.decode.manager) == "refused"
        code, text = both.decode.manager.warnings()[0]
        assert (code, text) == (
            "W201",
            "p0: refused: token: the peer's differs from the one configured here",
        )
        assert both.prefill.manager.status() == []  # a stranger leaves no record
        assert both.prefill.fabric.calls == []


async def test_a_mismatch_is_refused_by_name_on_both_sides_and_retried() -> None:
    other = replace(GEOMETRY, page_tokens=32)
    greeting = hello(Role.DECODE, geometry=wire_geometry(other), fingerprint="a" * 64)
    async with two(greeting=greeting) as both:
        await until(lambda: both.relay.connections >= 2)
        await until(lambda: both.prefill.manager.status())
        here, there = (node.manager.status()[0] for node in both.nodes)
        assert (here.state, there.state) == ("refused", "refused")
        assert "page_tokens: 32 here, 16 there" in here.last_error
        assert "fingerprint: aaaaaaaaaaaaaaaa (tiny) here, ffffffffffffffff" in here.last_error
        assert "page_tokens: 16 here, 32 there" in there.last_error
        assert (here.node, there.node) == ("prefill-1", "decode-1")
        assert [code for code, _ in both.prefill.manager.warnings()] == ["W201"]
        assert both.decode.manager.usable_prefills() == []
        assert both.decode.fabric.calls == both.prefill.fabric.calls == []


async def test_a_second_hello_of_a_node_fences_the_old_session() -> None:
    async with two() as both:
        await both.up()
        twin = Node(
            Switch(),
            Role.DECODE,
            prefill=(PrefillConfig("p0", "127.0.0.1", both.prefill.port),),
            peer=replace(FAST, reconnect_max_s=5.0),
        )
        twin.fabric._switch = both.decode.fabric._switch
        both.relay.freeze()  # the old one is half-open: only the new hello can end it in time
        await twin.start()
        await until(lambda: len(twin.listener.sessions) == 1)
        first, second = both.prefill.listener.sessions[:2]
        log = both.prefill.listener.log[:4]
        cause = "superseded by a new session of the same node"
        assert log[1] == ("lost", first.session, cause)
        assert {log[2], log[3]} == {("fenced", first.session), ("up", second.session)}
        names = [call[:2] for call in both.prefill.fabric.calls]
        assert names.index(("fence", first.session)) < names.index(("open_session", second.session))
        assert [status.name for status in both.prefill.manager.status()] == ["decode-1"]
        await twin.stop()
        both.relay.cut()


async def test_two_tables_that_name_one_node_do_not_fight() -> None:
    switch = Switch()
    prefill = Node(switch, Role.PREFILL)
    await prefill.start()
    same = tuple(PrefillConfig(name, "127.0.0.1", prefill.port) for name in ("a", "b"))
    decode = Node(switch, Role.DECODE, prefill=same)
    await decode.start()
    await until(lambda: {"up", "refused"} == {one.state for one in decode.manager.status()})
    await until(lambda: decode.listener.sessions)
    refused = next(one for one in decode.manager.status() if one.state == "refused")
    assert refused.last_error == "node: prefill-1 is already connected through another [[prefill]]"
    await asyncio.sleep(0.2)  # several retries
    assert len(decode.listener.sessions) == 1
    assert decode.listener.sessions[0].up
    await decode.stop()
    await prefill.stop()


async def test_a_node_with_the_certificate_of_another_is_refused(tmp_path: Path) -> None:
    """By the node that is dialled, where it would replace the real one, and by who dials."""
    authority = Authority(tmp_path, "ca")

    def peer(name: str, subject: str = "IP:127.0.0.1") -> PeerConfig:
        certificate, key = map(str, authority.sign(name, subject))
        tls = load_tls(certificate=certificate, key=key, ca=str(authority.path))
        return replace(FAST, tls=tls, tls_node_names=True)

    switch = Switch()
    prefill = Node(switch, Role.PREFILL, node="pf", peer=peer("pf"))
    await prefill.start()
    table = (PrefillConfig("p0", "127.0.0.1", prefill.port),)
    named = "IP:127.0.0.1,DNS:second"  # by its common name or by this one
    nodes = [
        Node(switch, Role.DECODE, node="first", peer=peer("first"), prefill=table),
        Node(switch, Role.DECODE, node="second", peer=peer("any", named), prefill=table),
    ]
    for node in nodes:
        await node.start()
    await until(lambda: nodes[0].listener.sessions and nodes[1].listener.sessions)
    false = Node(switch, Role.DECODE, node="first", peer=peer("stolen"), prefill=table)
    await false.start()
    await until(lambda: state(false.manager) == "refused")
    said = false.manager.status()[0].last_error
    assert "tls_node_names: the certificate of first names stolen" in said
    found = {status.name: status.state for status in prefill.manager.status()}
    assert found == {"first": "up", "second": "up"}
    assert nodes[0].listener.kinds() == ["up"]
    for node in (*nodes, false):
        await node.stop()
    await prefill.stop()

    other = Node(switch, Role.PREFILL, node="other", peer=replace(peer("pf"), tls_node_names=False))
    await other.start()
    table = (PrefillConfig("p0", "127.0.0.1", other.port),)
    dialler = Node(switch, Role.DECODE, node="first", peer=peer("first"), prefill=table)
    await dialler.start()
    await until(lambda: state(dialler.manager) == "refused")
    assert "the certificate of other names pf" in dialler.manager.status()[0].last_error
    await dialler.stop()
    await other.stop()


async def test_no_more_nodes_than_max_peers() -> None:
    switch = Switch()
    prefill = Node(switch, Role.PREFILL, peer=replace(FAST, max_peers=1))
    await prefill.start()
    table = (PrefillConfig("p0", "127.0.0.1", prefill.port),)
    first = Node(switch, Role.DECODE, node="first", prefill=table)
    second = Node(switch, Role.DECODE, node="second", prefill=table)
    await first.start()
    await until(lambda: first.listener.sessions)
    await second.start()
    await until(lambda: state(second.manager) == "refused")
    assert "max_peers: 1 here, 1 nodes are connected" in second.manager.status()[0].last_error
    assert [status.name for status in prefill.manager.status()] == ["first"]
    assert first.listener.sessions[0].up
    await first.stop()
    await until(lambda: second.listener.sessions)  # room now
    await second.stop()
    await prefill.stop()


# what the fabric and the engine may do


@pytest.mark.parametrize("call", ["open_session", "connect", "set_remote", "probe"])
async def test_a_fabric_call_that_fails_ends_the_attempt_with_its_text(call: str) -> None:
    async with two() as both:
        await both.up()
        both.decode.fabric.refuse.add(call)
        both.relay.cut()
        text = f"fabric: {call}: refused by the test"
        await until(lambda: text in both.decode.manager.status()[0].last_error)
        both.decode.fabric.refuse.clear()
        await both.up(2)


async def test_a_fabric_that_does_not_answer_meets_the_deadline() -> None:
    quick = replace(FAST, connect_timeout_s=0.2)
    async with two(decode_peer=quick) as both:
        await both.up()
        both.decode.fabric.hold.add("probed")
        both.relay.cut()
        await until(lambda: "no probe within 0.2 s" in both.decode.manager.status()[0].last_error)
        both.decode.fabric.hold.clear()
        await both.up(2)


async def test_a_peer_that_is_busy_and_does_not_move_gets_no_new_work() -> None:
    async with two(decode_peer=replace(FAST, request_stall_s=0.2)) as both:
        await both.up()
        counters = both.prefill.counters
        both.prefill.counters = counters._replace(step_busy=True, steps=5)
        await until(lambda: both.decode.manager.usable_prefills() == [])
        text = "p0: progress stalled: busy in pass 5 for 0.2 s"
        assert both.decode.manager.warnings() == [("W203", text)]
        assert both.decode.listener.sessions[0].up
        both.prefill.counters = counters._replace(step_busy=True, steps=6)
        await until(lambda: both.decode.manager.usable_prefills() != [])
        assert both.decode.manager.warnings() == []


async def test_dialing_says_what_went_wrong() -> None:
    unused = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = unused.sockets[0].getsockname()[1]
    unused.close()
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    silent_port = silent.sockets[0].getsockname()[1]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    http = await asyncio.start_server(answer, "127.0.0.1", 0)
    http_port = http.sockets[0].getsockname()[1]
    ports = {"closed": port, "silent": silent_port, "http": http_port}
    node = Node(
        Switch(),
        Role.DECODE,
        peer=replace(FAST, connect_timeout_s=0.2),
        prefill=tuple(PrefillConfig(name, "127.0.0.1", ports[name]) for name in ports),
    )
    await node.start()
    await until(lambda: all(one.last_error for one in node.manager.status()))
    assert {one.name: one.last_error for one in node.manager.status()} == {
        "closed": f"127.0.0.1:{port}: {os.strerror(111)}",
        "silent": f"127.0.0.1:{silent_port} did not answer within 0.2 s",
        "http": f"127.0.0.1:{http_port} answers HTTP 404: no peer listener",
    }
    assert {one.state for one in node.manager.status()} == {"connecting"}
    assert [code for code, _ in node.manager.warnings()] == ["W202"] * 3
    await node.stop()
    silent.close()
    http.close()
