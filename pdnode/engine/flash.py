"""The FlashInfer back end: paged attention on a GPU, planned once per pass and run once per layer.

Letters as in engine.attention. K and V go to FlashInfer as a *tuple* of strided views of the pages
`[P, Hr, 2, T, D]`, which is what its append, FA2 prefill and decode kernels take (read in 0.7.4:
the strides of K and V must be equal, the last dimension contiguous); one 5-D tensor would have to
be `[P, 2, Hr, T, D]`. So `backend="fa2"` everywhere: "auto" may take kernels that want other
layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import Segment
from pdnode.engine.flash_tables import FixedTables, Ints, PassTables, Tables, starts
from pdnode.memory.layout import TORCH_DTYPES, LayerViews
from pdnode.models.config import ModelConfig
from pdnode.models.passes import LatentUp

WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends
_TENSOR_CORE_GROUP = 4  # query heads a KV head from which tensor cores pay in decoding


@dataclass(frozen=True, slots=True)
class FlashShape:
    """What the kernels must know of a rank's part of a model beside the geometry of its pages."""

    heads: int  # H of this rank
    scale: float  # of the scores
    latent_dim: int = 0  # MLA: R; the rest of a latent is rotary

    @classmethod
    def of(cls, config: ModelConfig, *, tp: int) -> "FlashShape":
        latent = config.latent.kv_rank if config.latent else 0
        return cls(config.heads // tp, config.attention_scale, latent)


class FlashAttention:
    """AttentionBackend over the module `flashinfer`, for one rank's pages on a GPU.

    Planning takes page tables from host memory and waits for nothing on the device. Queries, keys
    and values have the dtype of the pages.
    """

    def __init__(
        self,
        flashinfer: Any,  # noqa: ANN401 - it has no types
        layers: Sequence[LayerViews],
        geometry: KvGeometry,
        shape: FlashShape,
        workspace: Tensor,
        *,
        fixed: FixedTables | None = None,
    ) -> None:
        """`workspace`: WORKSPACE_BYTES zeros on the device; back ends whose passes do not overlap
        share it. `fixed`: for a pass that a CUDA graph replays."""
        self._flashinfer = flashinfer
        self._layers = layers
        self._geometry = geometry
        self._shape = shape
        self._device = workspace.device
        self._dtype = TORCH_DTYPES[geometry.dtype]
        self._rows: PassTables = fixed or PassTables(self._device)
        self._decode_rows: slice | Tensor | None = None  # None: there are none
        self._prefill_rows: slice | Tensor | None = None
        if geometry.kind == "mla":
            self._latent = _latent_wrapper(flashinfer, workspace, fixed)
        else:
            group = shape.heads // geometry.heads_per_rank
            self._decode = _decode_wrapper(flashinfer, workspace, group, fixed)
            self._prefill: Any = None  # where none of several rows can come
            if fixed is None:
                self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                    workspace, kv_layout="HND", backend="fa2"
                )

    def plan(self, segments: Sequence[Segment]) -> None:
        # FlashInfer numbers those that decode first, then the others; its MLA takes all alike.
        latent = self._geometry.kind == "mla"
        one = [n for n, segment in enumerate(segments) if segment.count == 1 and not latent]
        several = [n for n, segment in enumerate(segments) if segment.count > 1 or latent]
        order = one + several
        tables = Tables.of([segments[place] for place in order], self._geometry)
        counts = [segment.count for segment in segments]
        number = np.empty(len(order), dtype=np.int32)
        number[order] = np.arange(len(order), dtype=np.int32)
        positions = [np.arange(s.start, s.start + s.count, dtype=np.int32) for s in segments]
        self._rows.plan(np.repeat(number, counts), np.concatenate(positions), tables)
        if latent:
            self._plan_latent(starts(counts), tables)
            return
        firsts = starts(counts)
        self._decode_rows = self._prefill_rows = None
        if one:
            self._decode_rows = self._place(firsts[one])
            self._plan_decode(tables.part(0, len(one)))
        if several:
            rows = [np.arange(firsts[n], firsts[n + 1], dtype=np.int32) for n in several]
            self._prefill_rows = self._place(np.concatenate(rows))
            query_indptr = starts([segments[n].count for n in several])
            self._plan_prefill(query_indptr, tables.part(len(one), len(order)))

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        views, rows = self._layers[layer], self._rows
        cache = (views.keys, views.values)
        self._flashinfer.append_paged_kv_cache(
            keys,
            values,
            rows.sequences,
            rows.positions,
            cache,
            rows.indices,
            rows.indptr,
            rows.last,
            kv_layout="HND",
        )
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if self._decode_rows is not None:
            chosen = queries[self._decode_rows].contiguous()
            out[self._decode_rows] = self._decode.run(chosen, cache)
        if self._prefill_rows is not None:
            chosen = queries[self._prefill_rows].contiguous()
            out[self._prefill_rows] = self._prefill.run(chosen, cache)
        return out

    def run_latent(self, layer: int, queries: Tensor, latents: Tensor, up: LatentUp) -> Tensor:
        """Every row in the latents' space, also those of a prompt: FlashInfer's MLA kernels read
        latents as they lie, and unfolding them first would need memory for a whole context."""
        cached = self._layers[layer].keys[:, 0]  # [P, T, R + P]
        rank, rows = self._shape.latent_dim, self._rows
        self._flashinfer.append_paged_mla_kv_cache(
            latents[:, :rank],
            latents[:, rank:],
            rows.sequences,
            rows.positions,
            cached[..., :rank],
            cached[..., rank:],
            rows.indices,
            rows.indptr,
            rows.last,
        )
        plain = up.keys.shape[1]
        inward = torch.einsum("nhq,hqr->nhr", queries[..., :plain], up.keys)
        query = torch.cat((inward, queries[..., plain:]), dim=-1)
        mixed = self._latent.run(query=query, kv_cache=cached)
        return torch.einsum("nhr,hvr->nhv", mixed, up.values)

    def _place(self, rows: Ints) -> slice | Tensor:
        """An index of these rows of a pass: a slice where they are neighbours."""
        first, end = int(rows[0]), int(rows[-1]) + 1
        if end - first == len(rows):
            return slice(first, end)
        return torch.from_numpy(rows).long().to(self._device)

    def _plan_decode(self, tables: Tables) -> None:
        self._decode.plan(
            torch.from_numpy(tables.indptr),
            torch.from_numpy(tables.indices),
            torch.from_numpy(tables.last),
            self._shape.heads,
            self._geometry.heads_per_rank,
            self._geometry.head_dim,
            self._geometry.page_tokens,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=self._shape.scale,
        )

    def _plan_prefill(self, query_indptr: Ints, tables: Tables) -> None:
        self._prefill.plan(
            torch.from_numpy(query_indptr),
            torch.from_numpy(tables.indptr),
            torch.from_numpy(tables.indices),
            torch.from_numpy(tables.last),
            self._shape.heads,
            self._geometry.heads_per_rank,
            self._geometry.head_dim,
            self._geometry.page_tokens,
            causal=True,
            sm_scale=self._shape.scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def _plan_latent(self, query_indptr: Ints, tables: Tables) -> None:
        self._latent.plan(
            metadata=self._flashinfer.mla.MLAPlanMetadata.csr(
                qo_indptr=torch.from_numpy(query_indptr),
                kv_indptr=torch.from_numpy(tables.indptr),
                kv_indices=torch.from_numpy(tables.indices),
                kv_len_arr=torch.from_numpy(tables.lengths),
            ),
            num_heads=self._shape.heads,
            head_dim_ckv=self._shape.latent_dim,
            head_dim_kpe=self._geometry.head_dim - self._shape.latent_dim,
            page_size=self._geometry.page_tokens,
            causal=True,
            sm_scale=self._shape.scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )


def _decode_wrapper(
    flashinfer: Any,  # noqa: ANN401
    workspace: Tensor,
    group: int,
    fixed: FixedTables | None,
) -> Any:  # noqa: ANN401
    """For `group` query heads a KV head."""
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        kv_layout="HND",
        use_cuda_graph=fixed is not None,
        use_tensor_cores=group >= _TENSOR_CORE_GROUP,
        paged_kv_indptr_buffer=fixed and fixed.indptr,
        paged_kv_indices_buffer=fixed and fixed.indices,
        paged_kv_last_page_len_buffer=fixed and fixed.last,
        backend="fa2",
    )


def _latent_wrapper(
    flashinfer: Any,  # noqa: ANN401
    workspace: Tensor,
    fixed: FixedTables | None,
) -> Any:  # noqa: ANN401
    return flashinfer.mla.BatchMLAPagedAttentionWrapper(
        workspace,
        use_cuda_graph=fixed is not None,
        qo_indptr=fixed and fixed.query_indptr,
        kv_indptr=fixed and fixed.indptr,
        kv_indices=fixed and fixed.indices,
        kv_len_arr=fixed and fixed.lengths,
        backend="fa2",
    )
