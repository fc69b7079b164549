"""Tensor views of a rank's KV region. Only the worker imports this (it needs torch).

Letters as in core/geometry.py: L layers, P pages, Hr KV heads of the rank, T tokens a page, D head
dimension. The region is `[L, P, Hr, 2 (K,V), T, D]`, or `[L, P, 1, 1, T, D]` for MLA.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pdnode.core.geometry import KvGeometry

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class LayerViews(NamedTuple):
    """One layer of the region; all three share its memory.

    keys, values: [P, Hr, T, D], strided; `rows`: [P * Hr * 2, T * D], contiguous, row
    `(page * Hr + head) * 2 + part` (part 0 K, 1 V) is one head of one page. MLA has one head and
    one part, the latents: `keys` and `values` are the same, `rows` is [P, T * D].
    """

    keys: Tensor
    values: Tensor
    rows: Tensor


def region_views(buffer: memoryview | Tensor, geometry: KvGeometry) -> list[LayerViews]:
    """Views of every layer of `buffer` (bytes of one rank's region, host or device memory)."""
    flat = (
        buffer if isinstance(buffer, Tensor) else torch.frombuffer(buffer, dtype=torch.uint8)
    ).view(TORCH_DTYPES[geometry.dtype])
    assert flat.nbytes == geometry.region_bytes, (flat.nbytes, geometry.region_bytes)
    heads, tokens, dim = geometry.heads_per_rank, geometry.page_tokens, geometry.head_dim
    parts = 2 if geometry.kind == "gqa" else 1
    whole = flat.view(geometry.layers, geometry.pages, heads, parts, tokens, dim)
    return [
        LayerViews(
            keys=layer[:, :, 0],
            values=layer[:, :, parts - 1],
            rows=layer.view(geometry.pages * heads * parts, tokens * dim),
        )
        for layer in whole
    ]
