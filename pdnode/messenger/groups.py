"""The TP groups of a prefill node, as the messenger sees them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdnode.core.schedule import Chunk
from pdnode.messenger.gate import PageGate
from pdnode.types import Run, SequenceId


class Schedule(Protocol):
    """What the messenger needs of a group's step loop."""

    def begin_prefill(
        self,
        *,
        tokens: list[int],
        pages: tuple[Run, ...],
        peer: str,
        priority: int,
        planned: Callable[[Chunk, int], None],
        computed: Callable[[Chunk], None],
    ) -> SequenceId: ...
    def remove(self, sequence: SequenceId) -> None: ...
    def waiting_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SourceRegion:
    """Where a rank's KV lives in the core: its region number and the counter its passes raise.

    The ranks of a group whose attention ends in an all-reduce share the leader's counter.
    """

    region: int
    counter: int
    group: int = 0  # its device group


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """A TP group that computes prompts: its page pool, its schedule, its ranks' memory."""

    gate: PageGate
    schedule: Schedule
    regions: tuple[SourceRegion, ...]  # by rank
