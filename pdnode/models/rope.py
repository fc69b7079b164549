"""Rotary positions: frequencies, their scaling, and the turn of a pass."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pdnode.models.config import RopeScaling


class Turn(NamedTuple):
    """Cosines and sines of one pass, [N, 1, D] each; the two halves of D are equal."""

    cosines: Tensor
    sines: Tensor


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies, [D / 2], float32. Scaling as published with Llama 3.1 ("llama3")."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / theta**steps
    if scaling.kind == "none":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    assert scaling.kind == "llama3", scaling.kind
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_context * plain / (2 * math.pi)  # in the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretch fully, 1: keep
    return (1 - keep) * plain / scaling.factor + keep * plain


def turn_of(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Turn:
    """`positions` [N] int64, `frequencies` [D / 2]."""
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2).unsqueeze(1)
    return Turn(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Rotary positions on [N, heads, D]; the halves of a head are the pairs' two parts."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * turn.cosines + swapped * turn.sines
