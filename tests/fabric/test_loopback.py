"""Connections over loopback are not paced; sockets that are none of the core's are left alone."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fabric.fabric_node import PROVIDERS, Node, join

LOOPBACK = ("127.0.0.1", 0)


def congestion_control(sock: socket.socket) -> str:
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0")[0].decode()


def connected_sockets() -> Iterator[socket.socket]:
    """Copies of this process's connected TCP sockets; the caller closes them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            sock.getpeername()
        except OSError:
            sock.close()
            continue
        if sock.type == socket.SOCK_STREAM and sock.family == socket.AF_INET:
            yield sock
        else:
            sock.close()


@contextmanager
def foreign_connection() -> Iterator[socket.socket]:
    with (
        socket.create_server(LOOPBACK) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0],
    ):
        yield here


@pytest.mark.parametrize("provider", PROVIDERS)
def test_no_connection_of_a_session_over_loopback_is_paced(provider: str) -> None:
    with foreign_connection() as foreign:
        untouched = congestion_control(foreign)
        own = (foreign.getsockname(), foreign.getpeername())
        sender, target = Node(provider), Node(provider)
        join(sender, target)
        found = []
        for sock in connected_sockets():
            if (sock.getsockname(), sock.getpeername()) not in (own, own[::-1]):
                found.append(congestion_control(sock))
            sock.close()
        assert len(found) >= 2  # both ends are here
        assert set(found) == {"reno" if untouched.startswith("bbr") else untouched}
        assert congestion_control(foreign) == untouched
        sender.close()
        target.close()
