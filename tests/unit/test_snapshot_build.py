"""The snapshot of a node with 256 requests in flight: what it says, and how large it is."""

from collections import Counter

import pytest

from pdnode.daemon.snapshot_peers import MAX_SHARES
from pdnode.daemon.snapshots import MAX_BYTES
from pdnode.obs.snapshot import MAX_REQUESTS, MAX_TRANSFERS, MAX_WARNINGS, Snapshot, decode
from pdnode.obs.warnings import Condition
from tests.support.busy_node import LAYERS, NICS, PEERS, BusyNode, busy_node

REQUESTS = 256


@pytest.fixture
async def node() -> BusyNode:
    node = busy_node()
    await node.take(REQUESTS)
    for second in range(1, 4):
        node.fabric.seconds = second
        node.observation.watch.sample()
    return node


def shown(node: BusyNode) -> Snapshot:
    return decode(node.control.snapshot())


async def test_the_document_is_bounded(node: BusyNode) -> None:
    assert len(node.control.snapshot()) <= MAX_BYTES <= 64 << 10
    snapshot = shown(node)
    assert len(snapshot.transfers) == MAX_TRANSFERS
    assert len(snapshot.requests) == MAX_REQUESTS
    assert (snapshot.requests_open, snapshot.transfers_inflight) == (REQUESTS, REQUESTS)


async def test_long_texts_make_the_lists_shorter(node: BusyNode) -> None:
    conditions = [Condition("W205", "x" * 1000, str(number)) for number in range(40)]
    node.observation.warnings.add_source(lambda: conditions)
    assert len(node.control.snapshot()) <= MAX_BYTES
    snapshot = shown(node)
    assert len(snapshot.warnings) == MAX_WARNINGS
    assert 0 < len(snapshot.requests) < MAX_REQUESTS
    assert snapshot.requests_open == REQUESTS


async def test_transfers_show_what_has_landed(node: BusyNode) -> None:
    transfers = shown(node).transfers
    ages = [one.age_s for one in transfers]
    assert ages == sorted(ages, reverse=True)
    assert Counter(one.state for one in transfers) == {"drain": REQUESTS // 4}
    whole = transfers[0]  # its count was reached; the writer has not said `drained`
    assert (whole.tokens, whole.pages, whole.pages_done) == (2047, 32, 32.0)
    assert whole.bytes == whole.bytes_done == 32 * LAYERS * 8 * 2 * 64 * 128 * 2
    for pull in list(node.pulls.open())[: REQUESTS // 4]:
        node.pulls.end(pull)
        node.pulls.session_lost(pull.session, "gone")
        node.pulls.session_fenced(pull.session)
    left = shown(node).transfers
    assert {one.state for one in left} <= {"queue", "prefill"}


async def test_a_transfer_under_way_is_half_there(node: BusyNode) -> None:
    for pull in list(node.pulls.open())[: REQUESTS // 4]:
        pull.grant.drain_done(0.0)
    half = shown(node).transfers[0]
    assert (half.state, half.pages_done) == ("prefill", 16.0)
    assert half.bytes_done == half.bytes // 2  # type: ignore[operator]
    assert half.bytes_per_s is not None


async def test_queues_pages_and_nics(node: BusyNode) -> None:
    snapshot = shown(node)
    queues = {one.name: (one.now, one.limit) for one in snapshot.queues}
    assert queues["waiting"] == (REQUESTS, 1024)
    assert queues["kv-wait"] == (REQUESTS * 3 // 4, 4095)
    assert queues["kv-drain"] == (REQUESTS // 4, None)
    assert snapshot.pages is not None
    assert snapshot.pages.used == REQUESTS // 4 * 40  # 2,048 + 511 tokens
    assert snapshot.pages.reserved == REQUESTS * 3 // 4 * 40
    assert len(snapshot.nics) == NICS
    assert snapshot.nics[0].line_bytes_per_s == 50e9
    assert len(snapshot.nics[0].rx_history) == 2
    assert len(snapshot.nics[0].peers) == MAX_SHARES < PEERS
    assert snapshot.model.kv_bytes_per_token == 327_680
    assert {one.name: one.state for one in snapshot.peers}["prefill-00"] == "slow"
    assert Counter(one.state for one in snapshot.requests) == {"waiting": 64, "kv-wait": 64}


async def test_a_node_that_loads_has_a_snapshot() -> None:
    node = busy_node()
    node.service.loading = "weights 40%"
    parts = node.observation.parts
    parts.engine = parts.transfer = parts.peers = parts.pull = None
    snapshot = shown(node)
    assert (snapshot.node.state, snapshot.node.detail) == ("loading", "weights 40%")
    assert (snapshot.pages, snapshot.nics, snapshot.ready) == (None, (), False)
    assert [one.code for one in snapshot.warnings] == ["W101"]
