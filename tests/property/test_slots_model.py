"""SlotPool against a naive model: a list of free slots and the uses of each."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdnode.core.slots import Slot, SlotPool


class SlotsMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 6))
    def start(self, slots: int) -> None:
        self.pool = SlotPool(slots)
        self.slots = slots
        self.free = list(range(1, slots + 1))
        self.uses: Counter[int] = Counter()
        self.out: list[Slot] = []

    @rule()
    def take(self) -> None:
        slot = self.pool.take()
        if not self.free:
            assert slot is None
            return
        oldest = self.free.pop(0)
        assert slot == (oldest, self.uses[oldest] % 256)
        self.uses[oldest] += 1
        self.out.append(slot)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.out))
        self.out.remove(slot)
        self.pool.give_back(slot)
        self.free.append(slot.slot)
        with pytest.raises(AssertionError):
            self.pool.give_back(slot)

    @precondition(lambda self: self.free)
    @rule(rounds=st.integers(200, 300))
    def wear(self, rounds: int) -> None:
        """Many uses, so that generations wrap."""
        for _ in range(rounds):
            slot = self.pool.take()
            assert slot is not None
            self.pool.give_back(slot)
            assert slot == (self.free[0], self.uses[self.free[0]] % 256)
            self.uses[self.free[0]] += 1
            self.free.append(self.free.pop(0))

    @invariant()
    def nothing_is_out_twice(self) -> None:
        assert (self.pool.free, self.pool.taken) == (len(self.free), len(self.out))
        assert self.pool.free + self.pool.taken == self.slots
        immediates = {slot.immediate for slot in self.out}
        assert len(immediates) == len(self.out)
        assert all(0 < i < 1 << 32 and i % 4096 == 0 and i >> 20 > 0 for i in immediates)


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30)
