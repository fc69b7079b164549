"""Immediate slots: which 12-bit slot and 8-bit generation a transfer into this node counts on.

An immediate is `slot << 20 | generation << 12 | weight`. The decode node gives slots
out, one per dispatch, so peers cannot clash. Slot 0 belongs to the self-test and to probes.
"""

from collections import deque
from typing import NamedTuple

MAX_SLOTS = 4095
GENERATIONS = 256


class Slot(NamedTuple):
    """One use of a slot."""

    slot: int  # 1..4095
    generation: int  # 0..255

    @property
    def immediate(self) -> int:
        """The immediate with weight 0, as `dispatch` carries it; the writer adds the weight."""
        return self.slot << 20 | self.generation << 12


class SlotPool:
    """Slots 1 … slots. The one given back longest ago goes out first, with a new generation.

    A late write is told apart by its generation, so a pair must repeat as late as possible: with
    all slots, after 4,095 x 256 transfers.
    """

    def __init__(self, slots: int = MAX_SLOTS) -> None:
        assert 1 <= slots <= MAX_SLOTS
        self._free = deque(Slot(slot, 0) for slot in range(1, slots + 1))
        self._taken: set[Slot] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> int:
        return len(self._taken)

    def take(self) -> Slot | None:
        """The next slot, or None: all are out, the request waits."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken.add(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Only after `drained` or a fence: nothing can be counted on `slot` any more."""
        assert slot in self._taken, f"{slot} is not out"
        self._taken.remove(slot)
        self._free.append(Slot(slot.slot, (slot.generation + 1) % GENERATIONS))
