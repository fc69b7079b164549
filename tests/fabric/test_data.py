"""Bytes and counts of paged writes, over real libfabric."""

import random
from collections.abc import Iterator

import pytest

from pdnode.core.geometry import KvGeometry
from pdnode.core.plan import pair_spans, routes
from tests.fabric.fabric_node import PROVIDERS, Node, by_rank, immediate, join

MIB = 1 << 20


@pytest.fixture(params=PROVIDERS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """Sender and target of one geometry, joined as session 1."""
    sender, target = (Node(request.param, pages=512, layers=3) for _ in range(2))
    sender.fill(5)
    join(sender, target)
    yield sender, target
    sender.close()
    target.close()


def push(sender: Node, target: Node, spans: list[tuple[int, int, int]], expected: int) -> list:
    """One transfer with one program; returns its record once both sides are content."""
    number = next(sender.numbers)
    target.fabric.arm(number, 200, 1, expected)
    sender.fabric.open_transfer(number, 1, immediate(number, 200))
    sender.submit(number, spans)
    sender.fabric.finish(number)
    reached = target.wait("reached", slot=number)
    assert (reached.generation, reached.count, reached.session) == (200, expected, 1)
    sender.wait("drained", transfer=number)
    target.gather()
    assert not target.events, "no overshoot"
    target.fabric.disarm(number)
    return sender.fabric.close_transfer(number)


def check(sender: Node, target: Node, spans: list[tuple[int, int, int]]) -> None:
    """The spans' pages arrived in every layer, and no other byte of the target is set."""
    written = {}
    for source, destination, count in spans:
        for index in range(count):
            written[destination + index] = source + index
    empty = bytes(target.page_bytes)
    for layer in range(target.layers):
        for page in range(target.pages):
            expected = sender.page(written[page], layer) if page in written else empty
            assert target.page(page, layer) == expected, (layer, page)


def test_scattered_pages_are_gathered(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    order = list(range(0, 512, 2))
    random.Random(1).shuffle(order)
    spans = [(page, 511 - page, 1) for page in order[:101]]
    record = push(sender, target, spans, 303)
    check(sender, target, spans)
    # Four pages an operation: 25 full ones and the rest.
    assert [(row[0], row[1], row[5], row[6]) for row in record] == [
        (0, layer, 101 * 4096, 26) for layer in range(3)
    ]


def test_runs_are_merged_up_to_a_mebibyte(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    spans = [(0, 100, 300), (400, 7, 10), (500, 450, 1)]
    record = push(sender, target, spans, 933)
    check(sender, target, spans)
    # 300 pages are 1.17 MiB: 256 pages; then 44, 10 and 1 gathered.
    assert [row[6] for row in record] == [2, 2, 2]
    assert sum(row[5] for row in record) == 3 * 311 * 4096
    assert sender.fabric.statistics()["posted_pages"] == 933


def test_one_page_and_all_pages(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    push(sender, target, [(3, 9, 1)], 3)
    check(sender, target, [(3, 9, 1)])
    push(sender, target, [(0, 0, 512)], 1536)
    assert target.memory[:] == sender.memory[:]
    flow = target.fabric.nic_statistics()[0]
    assert flow["received_units"] == 1539
    assert sender.fabric.nic_statistics()[0]["done_pages"] == 1539
    assert sender.fabric.peer_statistics()[0]["done_bytes"] == 1539 * 4096
    assert target.fabric.peer_statistics()[0]["received_units"] == 1539


def test_nothing_to_send_ends_at_once(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    push(sender, target, [], 0)
    number = next(sender.numbers)
    sender.fabric.open_transfer(number, 1, immediate(number, 0))
    sender.submit(number, [(0, 0, 1)], layers=0)
    sender.fabric.finish(number)
    sender.wait("drained", transfer=number)
    assert sender.fabric.close_transfer(number) == []
    sender.fabric.open_transfer(number, 1, immediate(number, 0))  # no program at all
    sender.fabric.finish(number)
    sender.wait("drained", transfer=number)
    check(sender, target, [])


def test_pages_of_a_byte_and_of_more_than_a_mebibyte() -> None:
    for page_bytes, pages in ((1, 64), (3 * MIB, 3)):
        sender, target = (Node(pages=pages, page_bytes=page_bytes) for _ in range(2))
        sender.memory[:] = random.Random(2).randbytes(sender.size)
        join(sender, target)
        record = push(sender, target, [(0, 0, pages)], pages)
        assert target.memory[:] == sender.memory[:]
        assert record[0][6] == (1 if page_bytes == 1 else 3)
        sender.close()
        target.close()


def test_a_weight_holds_at_most_4095_pages() -> None:
    sender, target = (Node(pages=5000, page_bytes=8) for _ in range(2))
    sender.fill(1)
    join(sender, target)
    record = push(sender, target, [(0, 0, 5000)], 5000)
    assert record[0][6] == 2
    assert target.memory[:] == sender.memory[:]
    sender.close()
    target.close()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (2, 1)])
def test_head_slices_between_unequal_ranks(provider: str, source_tp: int, target_tp: int) -> None:
    """TP 1 ↔ 2: every rank is a node here; the plan's routes carry head ranges of pages."""
    shape = {"kind": "gqa", "layers": 2, "kv_heads": 4, "head_dim": 8, "page_tokens": 4,
             "dtype": "float32"}  # fmt: skip
    source = KvGeometry(**shape, tp=source_tp, pages=40)
    target = KvGeometry(**shape, tp=target_tp, pages=56)
    senders = [Node(provider, 40, source.page_bytes, 2) for _ in range(source_tp)]
    targets = [Node(provider, 56, target.page_bytes, 2) for _ in range(target_tp)]
    from_pages = [5, 6, 7, 30, 2]
    to_pages = [11, 12, 50, 0, 1]
    session = 0
    for rank, sender in enumerate(senders):
        sender.fill(rank + 1)
        for destination in targets:
            session += 1
            join(sender, destination, session, session.to_bytes(16, "little"))
    spans = [tuple(span) for span in pair_spans(from_pages, to_pages)]
    for number, route in enumerate(routes(source, target), start=1):
        assert not route.whole_page
        holder = route.holders[0]
        sender, destination = senders[holder], targets[route.destination_rank]
        session = 1 + holder * target_tp + route.destination_rank
        destination.fabric.arm(number, 0, session, 10)
        sender.fabric.open_transfer(number, session, immediate(number, 0))
        sender.submit(
            number,
            spans,
            source_offset=route.source_offset,
            remote_offset=route.destination_offset,
            remote_layer_stride=target.layer_stride,
            remote_page_stride=target.page_bytes,
            length=route.length,
            whole_page=False,
        )
        sender.fabric.finish(number)
        assert destination.wait("reached", slot=number).count == 10
        sender.wait("drained", transfer=number)
        assert [row[6] for row in sender.fabric.close_transfer(number)] == [2, 2]
    head = source.head_bytes
    for layer in range(2):
        for page_from, page_to in zip(from_pages, to_pages, strict=True):
            sent = b"".join(sender.page(page_from, layer) for sender in senders)
            landed = b"".join(node.page(page_to, layer) for node in targets)
            assert sent == landed
            assert len(sent) == 4 * head
    for node in senders + targets:
        node.close()


def test_a_region_in_several_registrations() -> None:
    """A peer that describes its memory in pieces: no write crosses one."""
    sender, target = (Node(pages=32, page_bytes=4096) for _ in range(2))
    sender.fill(9)
    join(sender, target)
    [(nic, _, length, base, key)] = dict(by_rank(target.fabric.descriptors(1)))[0]
    step = 5 * 4096
    pieces = [
        (nic, offset, min(step, length - offset), base + offset, key)
        for offset in range(0, length, step)
    ]
    sender.fabric.set_remote(1, [(0, pieces)])
    record = push(sender, target, [(0, 0, 32)], 32)
    assert record[0][6] == 2  # 5, 5, 5, 5 and 5, 5, 2 pages gathered
    assert target.memory[:] == sender.memory[:]
    sender.close()
    target.close()


def test_a_thread_that_never_sleeps() -> None:
    sender, target = (Node(pages=64, poll="busy") for _ in range(2))
    sender.fill(6)
    join(sender, target)
    push(sender, target, [(0, 0, 64)], 64)
    assert target.memory[:] == sender.memory[:]
    assert sender.fabric.statistics()["wakeups"] == 0
    sender.close()
    target.close()
