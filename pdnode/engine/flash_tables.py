"""Page tables of a pass as FlashInfer takes them: int32 arrays, on the host and on the device.

Letters: N rows of a pass, B sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import Segment

Ints = NDArray[np.int32]


def starts(counts: Ints | Sequence[int]) -> Ints:
    """[B + 1]: where each of B pieces begins, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Tables:
    """The pages of sequence i are `indices[indptr[i]:indptr[i + 1]]`, and the last of them holds
    `last[i]` of its `lengths[i]` tokens. On the host."""

    indptr: Ints  # [B + 1]
    indices: Ints
    last: Ints  # [B]
    lengths: Ints  # [B]

    @classmethod
    def of(cls, segments: Sequence[Segment], geometry: KvGeometry) -> "Tables":
        lengths = np.array([s.start + s.count for s in segments], dtype=np.int32)
        pages = -(-lengths // geometry.page_tokens)
        for segment, length, used in zip(segments, lengths, pages, strict=True):
            assert segment.count > 0, "a segment without tokens"
            assert used <= len(segment.pages), f"{length} tokens in {len(segment.pages)} pages"
        found = [
            np.array(segment.pages, dtype=np.int32)[:used]
            for segment, used in zip(segments, pages, strict=True)
        ]
        last = (lengths - 1) % geometry.page_tokens + 1
        return cls(starts(pages), np.concatenate(found), last, lengths)

    def part(self, first: int, end: int) -> "Tables":
        """Those of the sequences from `first` to `end`."""
        begin, stop = self.indptr[first], self.indptr[end]
        return Tables(
            self.indptr[first : end + 1] - begin,
            self.indices[begin:stop],
            self.last[first:end],
            self.lengths[first:end],
        )


class PassTables:
    """Where the rows of a pass are appended, on the device: for each row its sequence and position,
    and the tables of all sequences. Planned anew for each pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        none = torch.empty(0, dtype=torch.int32, device=device)
        self.sequences = self.positions = none  # [N]
        self.indptr = self.indices = self.last = none

    def plan(self, sequences: Ints, positions: Ints, tables: Tables) -> None:
        parts = (sequences, positions, tables.indptr, tables.indices, tables.last)
        moved = torch.from_numpy(np.concatenate(parts)).to(self._device)
        pieces = torch.split(moved, [len(part) for part in parts])
        self.sequences, self.positions, self.indptr, self.indices, self.last = pieces


class FixedTables(PassTables):
    """Those of a recorded pass of exactly `rows` sequences with one row each: in tensors that stay
    where they are, with room for `max_pages` pages."""

    def __init__(self, rows: int, max_pages: int, device: torch.device) -> None:
        super().__init__(device)

        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.query_indptr = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.sequences = self.query_indptr[:-1]
        self.positions, self.last, self.lengths = zeros(rows), zeros(rows), zeros(rows)
        self.indptr, self.indices = zeros(rows + 1), zeros(max_pages)

    def plan(self, sequences: Ints, positions: Ints, tables: Tables) -> None:
        """Not the page tables: FlashInfer's own planning copies them to `indptr` and `indices`."""
        assert len(sequences) == len(self.last), "a recorded pass has a fixed number of rows"
        self.positions.copy_(torch.from_numpy(positions))
        self.last.copy_(torch.from_numpy(tables.last))
