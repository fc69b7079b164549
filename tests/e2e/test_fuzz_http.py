"""Clients that send anything to every listener, and connections that say nothing.

`make fuzz` sends 10,000 requests (`REQUESTS=…`), `make test` fewer.
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.census import settled
from tests.support.hostile_http import HostileRequest, HostileRequests
from tests.support.nodes import PATIENT, NodeSpec, cluster
from tests.support.unharmed import assert_held, assert_unharmed, while_right

REQUESTS = int(os.environ.get("PDNODE_FUZZ_REQUESTS", "3000"))
CLIENTS = 8
HALF_OPEN = 500
ANSWER_S = 60.0
SILENCE_S = 0.2  # then a request that may have no answer is given up

pytestmark = pytest.mark.timeout(1800)

Target = tuple[str, str | int]
"""What listens, and the port on loopback or the path of the socket."""


def targets(prefill: NodeSpec, decode: NodeSpec) -> list[Target]:
    return [
        ("decode api", decode.ports[0]),
        ("decode api", decode.ports[0]),
        ("prefill api", prefill.ports[0]),
        ("prefill link", prefill.ports[1]),
        ("decode admin", str(decode.admin)),
        ("prefill admin", str(prefill.admin)),
    ]


async def exchange(where: str | int, request: HostileRequest) -> int | None:
    """Status of the answer, None without one. What began with 200 must not end in an error."""
    if isinstance(where, str):
        reader, writer = await asyncio.open_unix_connection(where)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", where)
    head = body = b""
    try:
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(request.data)
            async with asyncio.timeout(ANSWER_S if request.whole else SILENCE_S):
                head = await reader.readline()
                while part := await reader.read(65536):
                    body += part
    finally:
        writer.transport.abort()
    words = head.split()
    if len(words) < 2:
        return None
    assert words[0].startswith(b"HTTP/"), head  # the version may be what the request said
    assert words[1] != b"200" or b'"error":' not in body, (request.data[:4000], body[-1000:])
    return int(words[1])


async def attack(
    found: list[Target], requests: Iterator[int], seed: int, statuses: Counter[str]
) -> None:
    draw = HostileRequests(f"client {seed}")
    for number in requests:
        name, where = found[number % len(found)]
        request = draw.actions() if "admin" in name else draw.generation()
        status = await exchange(where, request)
        statuses[f"{name} {status}"] += 1
        assert status is None or status < 500, (name, status, request.data[:4000])
        # The others answer before they have read a body, and the reset may overtake the answer.
        reads = request.whole and name == "decode api"
        assert status is not None or not reads, request.data[:4000]


async def test_requests_of_any_kind(tiny_model: Path, tmp_path: Path) -> None:
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path, peer=PATIENT)
    decode = NodeSpec("dc", "decode", tiny_model, tmp_path, (prefill,), peer=PATIENT)
    async with cluster(prefill, decode) as (running, (p, d)):
        await while_right(d, lambda: True)
        before = await settled(*running)
        begun = time.monotonic()
        statuses: Counter[str] = Counter()
        numbers = iter(range(REQUESTS))
        found = targets(prefill, decode)
        async with asyncio.TaskGroup() as group:
            attackers = [
                group.create_task(attack(found, numbers, seed, statuses)) for seed in range(CLIENTS)
            ]
            right = group.create_task(while_right(d, lambda: all(one.done() for one in attackers)))
        for client in (p, d):
            await client.wait_no_pages()
        assert_unharmed(running)
        grown = await assert_held(before, *running)
        sys.stdout.write(
            f"{statuses.total()} requests in {time.monotonic() - begun:.0f} s, "
            f"{dict(sorted(statuses.items()))}, {right.result()} right meanwhile, {grown}\n"
        )
        assert statuses.total() == REQUESTS
        assert statuses["decode api 200"] > 0
        assert right.result() > 0


def connect(one: socket.socket, where: str | int) -> None:
    """Where the backlog is full a unix socket refuses at once; the node is about to take them."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            one.connect(where if isinstance(where, str) else ("127.0.0.1", where))
        except BlockingIOError:
            assert time.monotonic() < deadline, where
            time.sleep(0.01)
        else:
            return


@contextlib.contextmanager
def half_open(where: str | int, data: bytes) -> Iterator[list[socket.socket]]:
    """`HALF_OPEN` connections that begin with `data` and go on with nothing."""
    held: list[socket.socket] = []
    try:
        for _ in range(HALF_OPEN):
            family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
            one = socket.socket(family)
            held.append(one)
            one.settimeout(10.0)
            connect(one, where)
            with contextlib.suppress(ConnectionError):  # turned away
                one.sendall(data)
        yield held
    finally:
        for one in held:
            one.close()


async def test_half_open_connections(tiny_model: Path, tmp_path: Path) -> None:
    """500 to one listener after the other: others are served, and nothing of them is left."""
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path, peer=PATIENT)
    decode = NodeSpec("dc", "decode", tiny_model, tmp_path, (prefill,), peer=PATIENT)
    late = NodeSpec("late", "decode", tiny_model, tmp_path, (prefill,), peer=PATIENT)
    async with cluster(prefill, decode) as (running, (_, d)):
        await while_right(d, lambda: True)
        before = await settled(*running)
        for name, where in {
            **dict(targets(prefill, decode)), "fabric": prefill.ports[2]
        }.items():  # fmt: skip
            with half_open(where, b"POST /v1/completions HTT"):
                assert await while_right(d, lambda: True) > 0, name
            assert_unharmed(running)
            sys.stdout.write(f"{name}: {await assert_held(before, *running)}\n")
        async with cluster(late) as (_, (another,)):
            assert await while_right(another, lambda: True) > 0
