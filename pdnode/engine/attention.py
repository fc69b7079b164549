"""Paged attention behind one interface: plan once per pass, run once per layer.

Letters: N tokens of a pass, B sequences that decode, S tokens attended to, H query heads, Hr KV
heads, G = H / Hr, D head dimension, T tokens a page. Rows of a pass are its sequences' tokens, one
sequence after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdnode.core.geometry import KvGeometry
from pdnode.engine.latent import absorbed, unfolded
from pdnode.memory.layout import LayerViews
from pdnode.models.passes import LatentUp


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one sequence in a pass: `count` tokens at positions start, start + 1, …

    `pages` is the sequence's page table; it covers at least start + count tokens.
    """

    start: int
    count: int
    pages: Sequence[int]


class AttentionBackend(Protocol):
    """A back end over one rank's pages. `run` and `run_latent` are models.passes.PassAttention."""

    def plan(self, segments: Sequence[Segment]) -> None:
        """Prepare a pass: everything that is equal for all layers. Called before each pass."""

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...

    def run_latent(self, layer: int, queries: Tensor, latents: Tensor, up: LatentUp) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several rows. `gather` [2, Hr, pages]: rows of the layer (K, then V; for
    MLA one part, the latents)."""

    first_row: int
    count: int
    length: int  # S: cached tokens and this chunk
    gather: Tensor
    mask: Tensor | None  # [count, S], 0 or -inf; None: plain causal, nothing is cached


@dataclass(frozen=True, slots=True)
class _Decode:
    """Sequences with one row each and tables of about one length, padded to the longest."""

    rows: Tensor  # [B]
    gather: Tensor  # [2, B, Hr, pages]
    mask: Tensor  # [B, 1, 1, S], 0 or -inf


class TorchAttention:
    """CPU back end: torch's fused attention over gathered pages.

    Rows are gathered as whole heads of pages, which are contiguous pieces of T * D elements. Query
    heads that share a KV head never see a copy of it: prefill broadcasts it with stride 0, decode
    takes the G heads as G queries.

    Places of a page behind its last token are read and masked. A masked NaN would still spoil the
    sum, so a page that a pass begins and does not fill is cleared first.
    """

    def __init__(
        self, layers: Sequence[LayerViews], geometry: KvGeometry, dtype: torch.dtype
    ) -> None:
        """`dtype`: of queries, keys and values in `run`; the pages may have another."""
        self._layers = layers
        self._geometry = geometry
        self._dtype = dtype
        self._parts = torch.arange(2 if geometry.kind == "gqa" else 1).view(-1, 1, 1)
        self._heads = torch.arange(geometry.heads_per_rank).view(1, -1, 1)
        self._pages = torch.empty(0, dtype=torch.int64)  # [N] page of each row
        self._slots = torch.empty(0, dtype=torch.int64)  # [N] place in that page
        self._begun = torch.empty(0, dtype=torch.int64)  # pages begun and not filled
        self._prefills: list[_Prefill] = []
        self._decodes: list[_Decode] = []

    def plan(self, segments: Sequence[Segment]) -> None:
        page_tokens = self._geometry.page_tokens
        pages: list[Tensor] = []
        slots: list[Tensor] = []
        begun: list[int] = []
        self._prefills = []
        decodes: dict[int, list[tuple[int, Tensor, int]]] = {}
        row = 0
        for segment in segments:
            length = segment.start + segment.count
            used = self._geometry.pages_for(length)
            assert segment.count > 0, "a segment without tokens"
            assert used <= len(segment.pages), f"{length} tokens in {len(segment.pages)} pages"
            table = torch.tensor(segment.pages[:used], dtype=torch.int64)
            positions = torch.arange(segment.start, length)
            pages.append(table[positions // page_tokens])
            slots.append(positions % page_tokens)
            if length % page_tokens and length - length % page_tokens >= segment.start:
                begun.append(segment.pages[used - 1])
            if segment.count == 1:
                # Buckets by powers of two: padding at most doubles what is read.
                decodes.setdefault(used.bit_length(), []).append((row, table, length))
            else:
                self._prefills.append(self._plan_prefill(row, segment, table))
            row += segment.count
        self._pages, self._slots = torch.cat(pages), torch.cat(slots)
        self._begun = torch.tensor(begun, dtype=torch.int64)
        self._decodes = [self._plan_decode(group) for group in decodes.values()]

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        views = self._layers[layer]
        views.keys[self._begun] = 0
        views.values[self._begun] = 0
        views.keys[self._pages, :, self._slots] = keys.to(views.keys.dtype)
        views.values[self._pages, :, self._slots] = values.to(views.values.dtype)
        out = torch.empty_like(queries)
        for prefill in self._prefills:
            rows = slice(prefill.first_row, prefill.first_row + prefill.count)
            out[rows] = self._run_prefill(prefill, views.rows, queries[rows])
        for decode in self._decodes:
            out[decode.rows] = self._run_decode(decode, views.rows, queries[decode.rows])
        return out

    def run_latent(self, layer: int, queries: Tensor, latents: Tensor, up: LatentUp) -> Tensor:
        views = self._layers[layer]
        views.keys[self._begun] = 0
        views.keys[self._pages, 0, self._slots] = latents.to(views.keys.dtype)
        out = queries.new_empty(*queries.shape[:2], up.values.shape[1])
        for prefill in self._prefills:
            rows = slice(prefill.first_row, prefill.first_row + prefill.count)
            cached = self._gathered(views.rows, prefill.gather)[0, 0, : prefill.length]
            out[rows] = unfolded(queries[rows], cached, up, prefill.mask)
        for decode in self._decodes:
            cached = self._gathered(views.rows, decode.gather)[0]
            out[decode.rows] = absorbed(queries[decode.rows], cached, up, decode.mask)
        return out

    def _page_rows(self, table: Tensor) -> Tensor:
        """[2, Hr, pages]: for K and V, the row of each head of each page of `table` [pages]."""
        heads = table * self._geometry.heads_per_rank + self._heads
        return heads * len(self._parts) + self._parts

    def _plan_prefill(self, row: int, segment: Segment, table: Tensor) -> _Prefill:
        length = segment.start + segment.count
        mask = None
        if segment.start:
            mask = torch.full((segment.count, length), -torch.inf, dtype=self._dtype)
            mask = mask.triu(diagonal=segment.start + 1)
        return _Prefill(row, segment.count, length, self._page_rows(table), mask)

    def _plan_decode(self, group: list[tuple[int, Tensor, int]]) -> _Decode:
        longest = max(len(table) for _, table, _ in group)
        # Padding repeats a page of the sequence itself: masked, but its numbers must be finite.
        padded = [
            torch.cat((table, table[:1].expand(longest - len(table)))) for _, table, _ in group
        ]
        lengths = torch.tensor([length for _, _, length in group])
        places = torch.arange(longest * self._geometry.page_tokens)
        mask = torch.zeros(len(group), len(places), dtype=self._dtype)
        mask.masked_fill_(places >= lengths.unsqueeze(1), -torch.inf)
        return _Decode(
            rows=torch.tensor([row for row, _, _ in group]),
            gather=torch.stack([self._page_rows(table) for table in padded], dim=1),
            mask=mask.view(len(group), 1, 1, -1),
        )

    def _gathered(self, rows: Tensor, index: Tensor) -> Tensor:
        """Heads of pages as [*index.shape[:-1], pages * T, D]."""
        taken = rows.index_select(0, index.flatten())
        return taken.view(*index.shape[:-1], -1, self._geometry.head_dim).to(self._dtype)

    def _run_prefill(self, plan: _Prefill, rows: Tensor, queries: Tensor) -> Tensor:
        count, heads, dim = queries.shape
        kv_heads = self._geometry.heads_per_rank
        both = self._gathered(rows, plan.gather)[:, :, : plan.length]
        shared = both.unsqueeze(2).expand(2, kv_heads, heads // kv_heads, plan.length, dim)
        grouped = queries.view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(
            grouped, shared[0], shared[1], attn_mask=plan.mask, is_causal=plan.mask is None
        )
        return mixed.permute(2, 0, 1, 3).reshape(count, heads, dim)

    def _run_decode(self, plan: _Decode, rows: Tensor, queries: Tensor) -> Tensor:
        batch, heads, dim = queries.shape
        kv_heads = self._geometry.heads_per_rank
        keys, values = self._gathered(rows, plan.gather)
        grouped = queries.view(batch, kv_heads, heads // kv_heads, dim)
        mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.mask)
        return mixed.view(batch, heads, dim)
