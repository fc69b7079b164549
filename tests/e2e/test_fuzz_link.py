"""Peers that send anything: the node goes on, and answers others rightly meanwhile.

`make fuzz` sends 100,000 frames (`FRAMES=…`), `make test` fewer.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pdnode.types import Role
from tests.support.census import settled
from tests.support.hostile import HostileNode, hello_of
from tests.support.nodes import PATIENT, NodeSpec, RunningNode, cluster
from tests.support.unharmed import assert_held, assert_unharmed, while_right

FRAMES = int(os.environ.get("PDNODE_FUZZ_FRAMES", "20000")) // 2  # by decode nodes, and by prefill
HOSTILE_NODES = 3
POINTS_OF_A_LINK = 8  # seven in the handshake (tests/support/hostile.py), and up
UP_FRAMES = {Role.DECODE: 256, Role.PREFILL: 512}

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "peer-token"
    path.write_bytes(b"a peer token of the tests")
    path.chmod(0o600)
    return path


async def fuzz(
    hostile: list[HostileNode],
    running: list[RunningNode],
    right: Callable[[Callable[[], bool]], Awaitable[int]],
) -> None:
    """Until `FRAMES` frames are thrown; prints what happened."""

    def thrown() -> Counter[str]:
        return sum((node.thrown for node in hostile), Counter())

    def enough() -> bool:
        found = thrown()
        return found.total() >= FRAMES and len(found) == POINTS_OF_A_LINK

    before = await settled(*running)
    begun = time.monotonic()
    for node in hostile:
        await node.start()
    try:
        asked = await right(enough)
    finally:
        assert_unharmed(running)
        for node in hostile:
            await node.stop()
    total = thrown()
    heard: Counter[str] = sum((node.heard for node in hostile), Counter())
    assert_unharmed(running)
    grown = await assert_held(before, *running)
    sys.stdout.write(
        f"{total.total()} frames in {time.monotonic() - begun:.0f} s, by point {dict(total)}, "
        f"heard {dict(heard)}, {asked} requests right meanwhile, {grown}\n"
    )
    assert [fault for node in hostile for fault in node.faults] == []
    assert asked > 0


async def test_hostile_decode_nodes(tiny_model: Path, tmp_path: Path, secret: Path) -> None:
    peer = PATIENT | {"token_credential": str(secret), "drained_timeout_s": 2.0}
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path, peer=peer, kv={"pool_bytes": "8MiB"})
    decode = NodeSpec("dc", "decode", tiny_model, tmp_path, (prefill,), peer=peer)
    async with cluster(prefill, decode) as (running, (p, d)):
        token = secret.read_bytes()
        like = await hello_of(prefill.ports[1], token)
        hostile = [
            HostileNode(
                Role.DECODE, like, name=f"hostile-{number}", token=token,
                up_frames=UP_FRAMES[Role.DECODE], port=prefill.ports[1],
            )
            for number in range(HOSTILE_NODES)
        ]  # fmt: skip
        await fuzz(hostile, running, lambda done: while_right(d, done))
        for client in (p, d):
            await client.wait_no_pages()


async def test_a_hostile_prefill_node(tiny_model: Path, tmp_path: Path, secret: Path) -> None:
    """It is believed when it says that it will answer; what it delays goes elsewhere."""
    peer = PATIENT | {
        "token_credential": str(secret), "drained_timeout_s": 1.0, "request_stall_s": 1.0,
        "reconnect_max_s": 0.2,
    }  # fmt: skip
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path, peer=peer)
    token = secret.read_bytes()
    async with cluster(prefill) as (_, _):
        like = await hello_of(prefill.ports[1], token)
        stranger = NodeSpec("hostile", "prefill", tiny_model, tmp_path)
        hostile = HostileNode(
            Role.PREFILL, like, name="hostile", token=token, up_frames=UP_FRAMES[Role.PREFILL],
            port=stranger.ports[1],
        )  # fmt: skip
        decode = NodeSpec(
            "dc", "decode", tiny_model, tmp_path, (prefill, stranger), "local", peer=peer
        )
        async with cluster(decode) as (running, (d,)):
            await fuzz([hostile], running, lambda done: while_right(d, done))
            await d.wait_no_pages()
