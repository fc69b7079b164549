"""SlotPool: order of reuse, generations, the immediate."""

import pytest

from pdnode.core.slots import MAX_SLOTS, Slot, SlotPool


def test_slots_start_at_one_and_end_at_4095() -> None:
    pool = SlotPool()
    slots = [pool.take() for _ in range(MAX_SLOTS)]
    assert slots == [Slot(slot, 0) for slot in range(1, 4096)]
    assert pool.take() is None
    assert (pool.free, pool.taken) == (0, 4095)


def test_the_immediate_leaves_twelve_bits_for_the_weight() -> None:
    assert Slot(1, 0).immediate == 0x0010_0000
    assert Slot(4095, 255).immediate == 0xFFFF_F000
    assert Slot(0x123, 0x45).immediate == 0x1234_5000


def test_the_slot_given_back_longest_ago_comes_next_with_a_new_generation() -> None:
    pool = SlotPool(3)
    first, second, third = pool.take(), pool.take(), pool.take()
    assert first is not None
    assert second is not None
    assert third is not None
    for slot in (second, first, third):
        pool.give_back(slot)
    assert [pool.take() for _ in range(3)] == [Slot(2, 1), Slot(1, 1), Slot(3, 1)]
    assert pool.take() is None


def test_a_pair_repeats_after_256_uses() -> None:
    pool = SlotPool(1)
    seen = []
    for _ in range(257):
        slot = pool.take()
        assert slot is not None
        seen.append(slot)
        pool.give_back(slot)
    assert len(set(seen[:256])) == 256
    assert seen[256] == seen[0] == Slot(1, 0)


def test_a_slot_is_given_back_once_and_by_its_holder() -> None:
    pool = SlotPool(2)
    slot = pool.take()
    assert slot == Slot(1, 0)
    for other in (Slot(1, 1), Slot(2, 0), Slot(0, 0)):
        with pytest.raises(AssertionError, match="is not out"):
            pool.give_back(other)
    pool.give_back(slot)
    with pytest.raises(AssertionError, match="is not out"):
        pool.give_back(slot)
    assert (pool.free, pool.taken) == (2, 0)
    with pytest.raises(AssertionError):
        SlotPool(4096)
