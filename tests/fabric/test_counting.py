"""Counting of immediates: early, late, more than expected, and what arm refuses."""

from collections.abc import Iterator

import pytest

from pdnode.fabric._native import FabricError
from tests.fabric.fabric_node import Node, immediate, join


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    sender, target = Node(), Node()
    join(sender, target)
    yield sender, target
    sender.close()
    target.close()


def send(sender: Node, slot: int, generation: int, pages: int) -> None:
    """`pages` page units, each a write of its own; returns when they are in the target's memory."""
    number = next(sender.numbers)
    sender.fabric.open_transfer(number, 1, immediate(slot, generation))
    for page in range(pages):
        sender.submit(number, [(page, page, 1)])
    sender.fabric.finish(number)
    sender.wait("drained", transfer=number)
    sender.fabric.close_transfer(number)


def until_received(target: Node, total: int) -> None:
    while target.fabric.statistics()["received_units"] < total:
        target.gather(0.01)


def test_what_comes_before_arm_counts(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    send(sender, 7, 255, 3)
    until_received(target, 3)
    assert target.fabric.statistics()["early_immediates"] == 3
    target.fabric.arm(7, 255, 1, 3)
    assert target.wait("reached", slot=7).count == 3
    target.fabric.disarm(7)
    # The generation wraps: 0 comes after 255, and 255 again is late.
    send(sender, 7, 0, 2)
    send(sender, 7, 255, 4)
    until_received(target, 9)
    statistics = target.fabric.statistics()
    assert (statistics["early_immediates"], statistics["late_immediates"]) == (5, 4)
    target.fabric.arm(7, 0, 1, 4)
    send(sender, 7, 0, 2)
    assert target.wait("reached", slot=7).count == 4


def test_what_has_landed_can_be_read_at_any_time(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    assert target.fabric.counted(5) == 0
    send(sender, 5, 1, 2)
    until_received(target, 2)
    assert target.fabric.counted(5) == 0  # nobody has armed it: whose these are is not known
    target.fabric.arm(5, 1, 1, 4)
    assert target.fabric.counted(5) == 2
    send(sender, 5, 1, 2)
    target.wait("reached", slot=5)
    assert target.fabric.counted(5) == 4
    target.fabric.disarm(5)
    assert target.fabric.counted(5) == 0
    for slot in (0, 4096, -1):
        with pytest.raises(FabricError, match="is not 1 to 4095"):
            target.fabric.counted(slot)


def test_a_late_generation_is_dropped(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    target.fabric.arm(4095, 9, 1, 2)
    send(sender, 4095, 8, 5)
    send(sender, 4095, 9, 2)
    assert target.wait("reached", slot=4095).count == 2
    target.fabric.disarm(4095)
    send(sender, 4095, 9, 1)
    until_received(target, 8)
    assert target.fabric.statistics()["late_immediates"] == 6
    target.gather()
    assert target.events == []


def test_more_than_expected_is_said_once(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    target.fabric.arm(1, 0, 1, 2)
    send(sender, 1, 0, 5)
    assert target.wait("reached", slot=1).count == 2
    assert target.wait("overshoot", slot=1).count == 3
    until_received(target, 5)
    target.gather()
    assert target.events == []
    assert target.fabric.statistics()["overshoots"] == 1


def test_one_heavy_write_that_passes_the_mark_says_both(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    target.fabric.arm(1, 0, 1, 2)
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    sender.submit(1, [(0, 0, 64)])
    assert target.wait("reached", slot=1).count == 64
    assert target.wait("overshoot", slot=1).count == 64


def test_zero_expected_is_reached_at_once(pair: tuple[Node, Node]) -> None:
    _, target = pair
    target.fabric.arm(2, 1, 1, 0)
    event = target.wait("reached", slot=2)
    assert (event.count, event.generation, event.session) == (0, 1, 1)


def test_slots_of_a_fenced_session_count_no_more(pair: tuple[Node, Node]) -> None:
    sender, target = pair
    other = Node()
    join(other, target, 2, b"x" * 16)
    target.fabric.arm(1, 0, 1, 2)
    target.fabric.arm(2, 0, 2, 2)
    send(sender, 1, 0, 1)
    until_received(target, 1)
    target.fabric.fence(1)
    target.wait("fenced", session=1)
    # Not even over the other peer's connection.
    number = next(other.numbers)
    other.fabric.open_transfer(number, 2, immediate(1, 0))
    other.submit(number, [(0, 0, 3)])
    other.fabric.finish(number)
    other.wait("drained")
    until_received(target, 4)
    assert target.fabric.statistics()["late_immediates"] == 1  # one write of 3 pages
    other.fabric.open_transfer(50, 2, immediate(2, 0))
    other.submit(50, [(0, 0, 2)])
    assert target.wait("reached").slot == 2
    other.close()


def test_what_arm_and_disarm_refuse(pair: tuple[Node, Node]) -> None:
    _, target = pair
    target.fabric.arm(3, 0, 1, 1)
    for arguments, text in [
        ((0, 0, 1, 1), "slot 0 is not 1 to 4095"),
        ((4096, 0, 1, 1), "slot 4096 is not 1 to 4095"),
        ((5, 256, 1, 1), "generation 256 is not 0 to 255"),
        ((5, 0, 9, 1), "session 9 is not open"),
        ((5, 0, 1, -1), "expected: -1 is not"),
        ((3, 1, 1, 1), "slot 3 is armed already"),
    ]:
        with pytest.raises(FabricError, match=text):
            target.fabric.arm(*arguments)
    with pytest.raises(FabricError, match="slot 8 is not armed"):
        target.fabric.disarm(8)
