"""A step loop that moves when it is told to, for transfer_world.py."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from pdnode.core.schedule import Chunk
from pdnode.types import Run, SequenceId, expand_runs


@dataclass(slots=True, eq=False)
class _Sequence:
    tokens: int
    pages: set[int]
    planned: Callable[[Chunk, int], None]
    computed: Callable[[Chunk], None]
    done: int = 0
    chunks: int = 0


class Engine:
    """A step loop that moves when it is told to."""

    def __init__(self, page_tokens: int, layers: int) -> None:
        self._page_tokens, self._layers = page_tokens, layers
        self.sequences: dict[SequenceId, _Sequence] = {}
        self.flight: list[tuple[_Sequence, Chunk]] = []
        self.layers_left = 0
        self._numbers = count(1)

    def begin_prefill(
        self,
        *,
        tokens: list[int],
        pages: tuple[Run, ...],
        peer: str,
        priority: int,
        planned: Callable[[Chunk, int], None],
        computed: Callable[[Chunk], None],
    ) -> SequenceId:
        number = SequenceId(next(self._numbers))
        held = set(expand_runs(pages))
        self.sequences[number] = _Sequence(len(tokens), held, planned, computed)
        return number

    def remove(self, sequence: SequenceId) -> None:
        self.sequences.pop(sequence, None)

    def waiting_tokens(self) -> int:
        return 0

    def plan(self, rng: random.Random, base: int) -> None:
        for number, sequence in list(self.sequences.items()):
            if rng.random() < 0.3:
                continue
            end = min(sequence.done + self._page_tokens * rng.choice((1, 2)), sequence.tokens)
            last = end == sequence.tokens
            chunk = Chunk(
                number, sequence.done, end, samples=False, last=last, number=sequence.chunks
            )
            sequence.done, sequence.chunks = end, sequence.chunks + 1
            if last:
                del self.sequences[number]
            self.flight.append((sequence, chunk))
            sequence.planned(chunk, base)
        self.layers_left = self._layers if self.flight else 0

    def end_pass(self) -> None:
        flight, self.flight = self.flight, []
        for sequence, chunk in flight:
            sequence.computed(chunk)
