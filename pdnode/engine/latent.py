"""The two ways to attend to latents (MLA). Letters as in models.passes; S tokens attended to.

Unfolding costs a product per cached token and makes scores cheap: right for the many rows of a
prompt. Absorbing turns one row's query into the latents' space instead, and reads them as they lie:
right for decoding, where unfolding the whole context for one row would be most of the work.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pdnode.models.passes import LatentUp


def unfolded(queries: Tensor, cached: Tensor, up: LatentUp, mask: Tensor | None) -> Tensor:
    """One sequence's rows. `queries` [n, h, Q + P], `cached` [S, R + P], `mask` [n, S] or None:
    plain causal, n = S. Returns [n, h, V]."""
    rank = up.keys.shape[2]
    latents, turned = cached[:, :rank], cached[:, rank:]
    plain = torch.einsum("sr,hqr->hsq", latents, up.keys)
    keys = torch.cat((plain, turned.expand(len(plain), -1, -1)), dim=-1)
    values = torch.einsum("sr,hvr->hsv", latents, up.values)
    mixed = functional.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=up.scale,
    )
    return mixed.squeeze(0).transpose(0, 1)


def absorbed(queries: Tensor, cached: Tensor, up: LatentUp, mask: Tensor) -> Tensor:
    """One row of each of B sequences. `queries` [B, h, Q + P], `cached` [B, 1, S, R + P], `mask`
    [B, 1, 1, S]. Returns [B, h, V]."""
    plain = up.keys.shape[1]
    inward = torch.einsum("bhq,hqr->bhr", queries[..., :plain], up.keys)
    mixed = functional.scaled_dot_product_attention(
        torch.cat((inward, queries[..., plain:]), dim=-1).unsqueeze(1),
        cached,
        cached[..., : up.keys.shape[2]],
        attn_mask=mask,
        scale=up.scale,
    )
    return torch.einsum("bhr,hvr->bhv", mixed.squeeze(1), up.values)
