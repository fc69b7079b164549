"""Decode passes as CUDA graphs: one recorded per batch size, filled up to that size and replayed.

A graph keeps the addresses of all that it reads and writes, so every size has token ids, positions,
page tables and hidden states of its own, which stay where they are. The layer counter's kernel is
recorded with the pass: it adds to a number in device memory, so that a replay raises it as a pass
does (a recorded *store* would repeat one frozen value).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdnode.engine.attention import AttentionBackend, Segment
from pdnode.models.decoder import Decoder

MAX_ROWS = 256
"""Larger decode passes run without a graph: launching is little of their time."""
_STEP_ROWS = 16


class Recorder(Protocol):
    def __call__(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record the device's work in `body`, which has been run before; what is returned does it
        again and gives the tensor that `body` gave, with its new contents."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    attention: AttentionBackend
    replay: Callable[[], Tensor]  # hidden states [rows, E]


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to record for passes of up to `most` rows: 1, 2, 4, 8, then every 16th."""
    most = min(most, MAX_ROWS)
    sizes = [1, 2, 4, 8, *range(_STEP_ROWS, MAX_ROWS + 1, _STEP_ROWS)]
    return sizes[: bisect_left(sizes, most) + 1]


class DecodeGraphs:
    """The recorded passes of one rank. Belongs to its runner; all ranks replay alike."""

    def __init__(
        self,
        model: Decoder,
        sizes: Sequence[int],
        attention: Callable[[int], AttentionBackend],
        layer_done: Callable[[], None],
        record: Recorder,
    ) -> None:
        """`attention(rows)`: a back end over the pages for exactly so many rows of one token each,
        whose planned tensors stay where they are. Records all sizes, the largest first: its
        memory serves the others. Writes to page 0 while it does.
        """
        self._sizes = sorted(sizes)
        self._recorded: dict[int, _Recorded] = {}
        for rows in reversed(self._sizes):
            self._recorded[rows] = _record(model, rows, attention(rows), layer_done, record)

    def fits(self, segments: Sequence[Segment]) -> bool:
        """Whether a pass has one row a sequence, and no more of them than were recorded."""
        return len(segments) <= self._sizes[-1] and all(s.count == 1 for s in segments)

    def run(self, tokens: Sequence[int], segments: Sequence[Segment]) -> Tensor:
        """Hidden states [N, E] of a pass that `fits`; good until the next run.

        The rows that are missing repeat the sequence with the shortest context: they write to its
        page what it writes itself.
        """
        rows = self._sizes[bisect_left(self._sizes, len(segments))]
        chosen = self._recorded[rows]
        shortest = min(range(len(segments)), key=lambda place: segments[place].start)
        filling = [shortest] * (rows - len(segments))
        filled = [*segments, *(segments[place] for place in filling)]
        chosen.attention.plan(filled)
        chosen.tokens.copy_(torch.tensor([*tokens, *(tokens[place] for place in filling)]))
        chosen.positions.copy_(torch.tensor([segment.start for segment in filled]))
        return chosen.replay()[: len(segments)]


def _record(
    model: Decoder,
    rows: int,
    attention: AttentionBackend,
    layer_done: Callable[[], None],
    record: Recorder,
) -> _Recorded:
    tokens = torch.zeros(rows, dtype=torch.int64, device=model.device)
    positions = torch.zeros(rows, dtype=torch.int64, device=model.device)
    attention.plan([Segment(0, 1, [0])] * rows)
    # Kernels are compiled and libraries set up by a first run, which must not be recorded and must
    # not count as a pass.
    model.forward(tokens, positions, attention, lambda: None)
    replay = record(lambda: model.forward(tokens, positions, attention, layer_done))
    return _Recorded(tokens, positions, attention, replay)


class CudaRecorder:
    """Recorder by torch.cuda.graph; all graphs share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            found = body()

        def replay() -> Tensor:
            graph.replay()
            return found

        return replay
