"""Sessions: who is let in, who is not, and what is said when a peer is lost."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from pdnode.fabric._native import Fabric, FabricError
from pdnode.fabric.library import find_library
from tests.fabric.fabric_node import (
    PROVIDERS,
    TOKEN,
    WAIT_S,
    Node,
    by_rank,
    connect_process,
    immediate,
    join,
)

OTHER_TOKEN = b"fedcba9876543210"


def push(sender: Node, target: Node, session: int, slot: int) -> None:
    target.fabric.arm(slot, 0, session, 8)
    sender.fabric.open_transfer(slot, session, immediate(slot, 0))
    sender.submit(slot, [(0, 0, 8)])
    sender.fabric.finish(slot)
    target.wait("reached", slot=slot)
    sender.wait("drained", transfer=slot)
    sender.fabric.close_transfer(slot)


def test_a_wrong_token_is_rejected_and_disturbs_nobody() -> None:
    sender, good, bad = Node(), Node(), Node()
    join(sender, good)
    sender.open(2, OTHER_TOKEN, writable=False)
    for session, token in ((5, b"0" * 16), (6, OTHER_TOKEN[:-1] + b"1"), (7, OTHER_TOKEN + b"0")):
        bad.open(session, token)
        bad.fabric.connect(session, (0, 0), sender.address(session), 5.0)
        assert "refused" in bad.wait("lost", session=session, pair=(0, 0)).text
    assert sender.fabric.statistics()["rejected_connections"] == 3
    push(sender, good, 1, 1)
    # The right token gets in; a second connection with it does not.
    bad.open(8, OTHER_TOKEN)
    bad.fabric.connect(8, (0, 0), sender.address(8), 5.0)
    bad.wait("connected", session=8)
    sender.wait("connected", session=2)
    bad.open(9, OTHER_TOKEN)
    bad.fabric.connect(9, (0, 0), sender.address(9), 5.0)
    bad.wait("lost", session=9)
    sender.gather()
    assert sender.events == []
    push(sender, good, 1, 2)
    for node in (sender, good, bad):
        node.close()


@pytest.mark.parametrize(
    ("host", "listen", "to"), [("127.0.0.1", "0.0.0.0", "127.0.0.1"), ("::1", "::", "[::1]")]
)
def test_listening_on_every_address(host: str, listen: str, to: str) -> None:
    sender, target = Node(host=host), Node(host=host)
    port = sender.fabric.listen(0, listen, 0)
    sender.open(1, writable=False)
    target.open(1)
    target.fabric.connect(1, (0, 0), f"{to}:{port}".encode(), 5.0)
    target.wait("connected", session=1)
    sender.wait("connected", session=1)
    sender.close()
    target.close()


def test_a_token_of_a_fenced_session_is_rejected() -> None:
    sender, target = Node(), Node()
    join(sender, target)
    sender.fabric.fence(1)
    sender.wait("fenced")
    target.wait("lost", session=1)
    target.open(2, TOKEN)
    target.fabric.connect(2, (0, 0), sender.address(2), 5.0)
    target.wait("lost", session=2)
    assert sender.fabric.statistics()["rejected_connections"] == 1
    sender.close()
    target.close()


def test_garbage_on_the_fabric_port_does_no_harm() -> None:
    sender, target = Node(), Node()
    join(sender, target)
    held = []
    for index in range(40):
        connection = socket.create_connection(("127.0.0.1", sender.port))
        connection.sendall(os.urandom(1 + index * 50))
        held.append(connection)
    push(sender, target, 1, 1)
    for connection in held:
        connection.close()
    push(sender, target, 1, 2)
    sender.close()
    target.close()


def test_connect_to_a_closed_port_and_to_one_that_never_answers() -> None:
    node = Node()
    node.open(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    node.fabric.connect(1, (0, 0), f"127.0.0.1:{closed}".encode(), 5.0)
    assert "refused" in node.wait("lost", 2.0, session=1).text
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        node.open(2, OTHER_TOKEN)
        address = f"127.0.0.1:{silent.getsockname()[1]}".encode()
        node.fabric.connect(2, (0, 0), address, 0.3)
        assert node.wait("lost", session=2).text == "no connection within 300 ms"
        assert 0.29 < time.monotonic() - started < 2
        # After `lost` the same pair may be tried again.
        node.fabric.connect(2, (0, 0), address, 0.2)
        node.wait("lost", session=2)
    node.close()


def test_a_listener_is_closed_and_opened_again() -> None:
    """What came through it goes on; the same port can be had again."""
    sender, target = Node(), Node()
    join(sender, target)
    sender.fabric.unlisten(0)
    late = Node()
    late.open(1, OTHER_TOKEN)
    late.fabric.connect(1, (0, 0), f"127.0.0.1:{sender.port}".encode(), 5.0)
    assert "refused" in late.wait("lost", session=1).text
    push(sender, target, 1, 1)
    assert sender.fabric.listen(0, "127.0.0.1", sender.port) == sender.port
    sender.open(2, OTHER_TOKEN)
    late.fabric.connect(1, (0, 0), f"127.0.0.1:{sender.port}".encode(), 5.0)
    late.wait("connected", session=1)
    sender.wait("connected", session=2)
    for node in (sender, target, late):
        node.close()


def accepted_at(port: int) -> int:
    """How many connections this process has accepted at this port of loopback."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                copy.getpeername()
                found += copy.getsockname() == ("127.0.0.1", port)
        except OSError:  # no socket, or not connected
            continue
    return found


def test_a_listener_that_is_closed_ends_what_has_not_asked_yet() -> None:
    """libfabric would read a later request through the listener, whose memory it has freed."""
    sender, target = Node(), Node()
    join(sender, target)
    silent = [socket.create_connection(("127.0.0.1", sender.port)) for _ in range(20)]
    deadline = time.monotonic() + WAIT_S
    while accepted_at(sender.port) < 1 + len(silent):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    sender.fabric.unlisten(0)
    for connection in silent:
        connection.settimeout(WAIT_S)
        assert connection.recv(1) == b""
        connection.close()
    assert accepted_at(sender.port) == 1
    push(sender, target, 1, 1)
    sender.close()
    target.close()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_peer_that_never_probes_is_lost_at_the_deadline(provider: str) -> None:
    sender, target = Node(provider), Node(provider)
    scratch = sender.open(1, writable=False)
    target.open(1)
    target.fabric.connect(1, (0, 0), sender.address(1), 0.3)
    target.wait("connected")
    target.fabric.set_remote(1, scratch)
    target.fabric.probe(1)
    assert target.wait("lost").text == "no probe within 300 ms"
    sender.close()
    target.close()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_killed_peer_fails_what_is_on_the_way(provider: str) -> None:
    """The sender outlives its target; a new process gets nothing of the old session."""
    sender = Node(provider, pages=256, page_bytes=16384)
    sender.fill(1)
    command = [sys.executable, "-m", "tests.fabric.target_process", provider, "256", "16384"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as old:
        connect_process(sender, old, 1, TOKEN)
        sender.fabric.open_transfer(1, 1, immediate(5, 0))
        for _ in range(400):
            sender.submit(1, [(page, page, 1) for page in range(256)], whole_page=False)
        while sender.fabric.statistics()["posted_writes"] < 200:
            sender.gather(0.001)
        old.send_signal(signal.SIGKILL)
    started = time.monotonic()
    failed = sender.wait("failed", transfer=1)
    settled = sender.wait("settled", transfer=1)
    assert time.monotonic() - started < 2
    assert failed.pairs == settled.pairs == [(0, 0)]
    sender.wait("lost", session=1)
    assert sender.fabric.statistics()["writes"] == 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as new:
        # The old session is not even fenced yet, and would write if it could.
        connect_process(sender, new, 2, OTHER_TOKEN)
        sender.fabric.open_transfer(2, 1, immediate(5, 0))
        sender.submit(2, [(0, 0, 256)])
        sender.wait("failed", transfer=2)
        sender.fabric.open_transfer(3, 2, immediate(5, 0))
        sender.submit(3, [(3, 8, 4)])
        sender.fabric.finish(3)
        sender.wait("drained", transfer=3)
        # `drained` says that the pages are there; their immediate may still wait to be read.
        units, nonzero, first = ask(new)
        assert (nonzero, first) == (4, 8)
        while units < 4:
            units, nonzero, first = ask(new)
        assert (units, nonzero, first) == (4, 4, 8)
        new.communicate("", timeout=10)
    sender.close()


def test_a_prefill_that_comes_back_on_the_same_port_knows_no_old_token() -> None:
    old, target = Node(), Node()
    join(old, target)
    port = old.port
    old.close()
    target.wait("lost", session=1)
    new = Node(port=port)
    assert new.port == port
    target.fabric.connect(1, (0, 0), new.address(1), 5.0)  # nothing comes back by itself
    assert target.wait("lost", session=1).text == "lost before: the pair must be fenced first"
    target.fabric.fence(1, (0, 0))
    target.wait("fenced", session=1)
    target.open(1)
    target.fabric.connect(1, (0, 0), new.address(1), 5.0)  # the old session, once more
    assert "refused" in target.wait("lost", session=1).text
    assert new.fabric.statistics()["rejected_connections"] == 1
    join(new, target, 2, OTHER_TOKEN)
    push(new, target, 2, 1)
    new.close()
    target.close()


def ask(process: subprocess.Popen) -> tuple[int, int, int]:
    """Units that the target has received, its pages that are not empty, and the first of them."""
    process.stdin.write("what\n")
    process.stdin.flush()
    units, nonzero, first = process.stdout.readline().split()
    return int(units), int(nonzero), int(first)


def test_what_the_calls_refuse() -> None:
    library = str(find_library("auto", "tcp"))
    for arguments, text in [
        ((library, "shm", "adaptive"), "provider: 'shm' is not one of tcp, verbs, efa, tcp-rdm"),
        ((library, "tcp", "often"), "poll: 'often' is not one of adaptive, busy"),
        ((library, "verbs", "busy"), "provider 'verbs' is not available in "),
        (("libfabric.so.1", "tcp", "busy"), "'libfabric.so.1' is not an absolute path"),
        (("/nowhere/libfabric.so.1", "tcp", "busy"), "is loaded in this process already"),
    ]:
        with pytest.raises(FabricError, match=text):
            Fabric(*arguments)
    node = Node()
    fabric = node.fabric
    with pytest.raises(FabricError, match=r"NIC x \(192\.0\.2\.77\)"):
        fabric.add_group([("x", "192.0.2.77")])
    with pytest.raises(
        FabricError, match=r"Address already in use \(98\) \[tcp\] on 127\.0\.0\.1:"
    ):
        fabric.listen(0, "127.0.0.1", node.port)
    with pytest.raises(FabricError, match="nic 7 does not exist; there are 1"):
        fabric.open_session(1, [7], [], TOKEN)
    with pytest.raises(FabricError, match="token: 15 bytes, 16 to 46 are allowed"):
        fabric.open_session(1, [0], [], TOKEN[1:])
    with pytest.raises(FabricError, match="region 4 does not exist"):
        fabric.open_session(1, [0], [4], TOKEN)
    with pytest.raises(FabricError, match="session 1 is not open"):
        fabric.descriptors(1)
    node.open(1)
    with pytest.raises(FabricError, match=r"'host\.example:1' is not numeric host:port"):
        fabric.connect(1, (0, 0), b"host.example:1", 1.0)
    with pytest.raises(FabricError, match=r"deadline_s: .* is not above 0"):
        fabric.connect(1, (0, 0), b"127.0.0.1:1", float("nan"))
    [(nic, _, length, base, key)] = dict(by_rank(fabric.descriptors(1)))[0]
    for pieces, text in [
        ([(nic, 8, length, base, key)], "pieces leave gaps or overlap"),
        ([(64, 0, length, base, key)], "the NIC number is not 0 to 63"),
        ([(nic, 0, length, (1 << 64) - 1, key)], "too long"),
        ([(nic, 0, length, base, key), (1, 0, 8, base, key)], "its NICs disagree on the length"),
    ]:
        with pytest.raises(FabricError, match=text):
            fabric.set_remote(1, [(0, pieces)])
    with pytest.raises(FabricError, match="region 0 is open to session 1"):
        fabric.remove_region(0)
    fabric.fence(1)
    node.wait("fenced")
    fabric.remove_region(0)
    node.close()
    with pytest.raises(FabricError, match="the fabric is closed"):
        fabric.open_session(2, [0], [], TOKEN)
