"""The ends of a transfer: drained, failed, settled, stopped; and what submit refuses."""

import os
from collections.abc import Iterator

import pytest

from pdnode.fabric._native import FabricError
from tests.fabric.fabric_node import PROVIDERS, Node, immediate, join


@pytest.fixture(params=PROVIDERS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    sender, target = (Node(request.param, pages=64, page_bytes=65536) for _ in range(2))
    sender.fill(5)
    join(sender, target)
    yield sender, target
    sender.close()
    target.close()


def no_more(node: Node) -> None:
    node.gather(0.02)
    assert node.events == []


def test_drained_waits_for_finish_and_for_every_program(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    number, counter, fd = sender.counter()
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    target.fabric.arm(1, 0, 1, 3)
    sender.submit(1, [(0, 0, 1)])
    sender.submit(1, [(1, 1, 1)], counter=number)
    sender.submit(1, [(2, 2, 1)])
    while target.fabric.statistics()["received_units"] < 2:
        target.gather(0.01)
    sender.fabric.finish(1)
    no_more(sender)
    with pytest.raises(FabricError, match="transfer 1 has neither drained nor settled"):
        sender.fabric.close_transfer(1)
    with pytest.raises(FabricError, match="region 0 is the source of transfer 1"):
        sender.fabric.remove_region(0)
    with pytest.raises(FabricError, match="transfer 1 is finished"):
        sender.submit(1, [(0, 0, 1)])
    with pytest.raises(FabricError, match="groups: they are added before the counters"):
        sender.fabric.add_group([("lo", "127.0.0.1")])
    counter.raise_layer()
    sender.wait("drained", transfer=1)
    assert target.wait("reached").count == 3
    assert [row[0] for row in sender.fabric.close_transfer(1)] == [0, 1, 2]
    no_more(sender)
    os.close(fd)


def test_stop_in_mid_stream_drains_what_is_out(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    for _ in range(200):
        sender.submit(1, [(page, page, 1) for page in range(64)])
    while sender.fabric.statistics()["posted_writes"] < 10:
        sender.gather(0.001)
    sender.fabric.stop(1)
    sender.wait("drained", transfer=1)
    statistics = sender.fabric.statistics()
    assert statistics["posted_pages"] < 200 * 64
    assert statistics["writes"] == statistics["pages"] == statistics["bytes"] == 0
    target.gather(0.05)
    assert target.fabric.statistics()["received_units"] == statistics["posted_pages"]
    sender.fabric.stop(1)
    sender.fabric.finish(1)
    no_more(sender)


def test_a_fence_at_the_target_fails_and_settles(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    for transfer in (1, 2):
        sender.fabric.open_transfer(transfer, 1, immediate(transfer, 0))
        for _ in range(100):
            sender.submit(transfer, [(page, page, 1) for page in range(64)])
    while sender.fabric.statistics()["posted_writes"] < 80:
        sender.gather(0.001)
    target.fabric.fence(1)
    for transfer in (1, 2):
        failed = sender.wait("failed", transfer=transfer)
        assert failed.pairs in ([(0, 0)], [])
        assert failed.text
        assert sender.wait("settled", transfer=transfer).session == 1
    assert sender.fabric.statistics()["writes"] == 0
    sender.wait("lost", session=1)
    sender.submit(1, [(0, 0, 1)])  # Python may not have heard of it yet: no error, no write
    no_more(sender)
    posted = sender.fabric.statistics()["posted_writes"]
    sender.fabric.open_transfer(3, 1, immediate(3, 0))
    sender.submit(3, [(0, 0, 1)])
    assert "no connection to rank 0 of the peer is up" in sender.wait("failed", transfer=3).text
    sender.wait("settled", transfer=3)
    assert sender.fabric.statistics()["posted_writes"] == posted


def test_the_senders_own_fence_settles_everything(pair: tuple[Node, Node]) -> None:
    sender, _ = pair
    for transfer in (1, 2, 3):
        sender.fabric.open_transfer(transfer, 1, immediate(transfer, 0))
    for _ in range(50):
        sender.submit(1, [(page, page, 1) for page in range(64)])
    sender.submit(2, [(0, 0, 1)])
    sender.fabric.finish(2)
    sender.wait("drained", transfer=2)
    sender.fabric.fence(1)
    sender.wait("fenced", session=1)
    for transfer in (1, 3):  # the second of them has no program at all
        assert sender.wait("failed", transfer=transfer).text
        sender.wait("settled", transfer=transfer)
        sender.fabric.close_transfer(transfer)
    no_more(sender)
    flow = sender.fabric.nic_statistics()[0]
    assert flow["posted_writes"] == flow["done_writes"] + flow["failed_writes"]
    assert sender.fabric.statistics()["sessions"] == 0
    assert sender.fabric.statistics()["transfers"] == 1


def test_a_forged_program_is_refused_before_anything_is_queued(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    fabric = sender.fabric
    fabric.open_transfer(1, 1, immediate(1, 0))
    page = 65536
    for spans, changed, text in [
        ([(0, 64, 1)], {}, "destination page 64 is outside of the peer's rank 0 of 4194304 bytes"),
        ([(0, 60, 5)], {}, "destination page 64 is outside"),
        ([(64, 0, 1)], {}, "source page 64 is outside of region 0 of 4194304 bytes"),
        ([(0, 0, 1), (1, 1 << 50, 1)], {}, "out of range"),
        ([(0, 0, 0)], {}, "out of range"),
        ([(-1, 0, 1)], {}, "spans: -1 is negative"),
        ([(0, 0)], {}, r"an entry is not \(source, destination, count\)"),
        ([(0, 63, 1)], {"remote_offset": 1, "whole_page": False}, "destination page 63 is outside"),
        ([(0, 0, 1)], {"layers": 2}, "outside"),
        ([(0, 0, 1)], {"layers": 65537}, "layers: 65537 is not 0 to 65536"),
        ([(0, 0, 1)], {"length": page - 1}, "whole_page: the length is not the page stride"),
        ([(0, 0, 1)], {"length": 0, "whole_page": False}, "length: 0 is not 1 to"),
        ([(0, 0, 1)], {"source_offset": -1}, "outside"),
        ([(0, 0, 1)], {"remote_layer_stride": (1 << 63) - 1, "layers": 60000}, "outside"),
        ([(0, 0, 1)], {"remote_rank": 1}, "remote_rank: the peer has described no rank 1"),
        ([(0, 0, 1)], {"remote_rank": -1}, "remote_rank: the peer has described no rank -1"),
        ([(0, 0, 1)], {"counter": 4}, "counter 4 does not exist"),
        ([(0, 0, 1)], {"region": 4}, "region 4 does not exist"),
    ]:
        with pytest.raises(FabricError, match=text):
            sender.submit(1, spans, **changed)
    for value in (0, 1 << 32, immediate(1, 0) + 1, 1 << 12):
        with pytest.raises(FabricError, match="is not slot << 20"):
            fabric.open_transfer(2, 1, value)
    fabric.finish(1)
    sender.wait("drained", transfer=1)
    assert fabric.close_transfer(1) == []
    with pytest.raises(FabricError, match="transfer 1 is not open"):
        fabric.finish(1)
    assert fabric.statistics()["posted_writes"] == 0
    assert target.memory[:] == bytes(target.size)


def test_a_peer_that_lies_about_its_memory_loses_its_connection_only() -> None:
    sender, honest, liar = (Node(pages=16) for _ in range(3))
    join(sender, honest)
    join(sender, liar, 2, b"x" * 16)
    [(nic, _, length, base, key)] = dict(liar.fabric.descriptors(2))[0]
    sender.fabric.set_remote(2, [(0, [(nic, 0, 4 * length, base, key)])])
    sender.fabric.open_transfer(1, 2, immediate(1, 0))
    sender.submit(1, [(0, 40, 1)])
    assert sender.wait("failed", transfer=1).pairs == [(0, 0)]
    sender.wait("settled", transfer=1)
    sender.wait("lost", session=2)
    sender.fill(2)
    honest.fabric.arm(1, 0, 1, 16)
    sender.fabric.open_transfer(2, 1, immediate(1, 0))
    sender.submit(2, [(0, 0, 16)])
    honest.wait("reached")
    assert honest.memory[:] == sender.memory[:]
    for node in (sender, honest, liar):
        node.close()
