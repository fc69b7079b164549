"""Rotary positions: frequencies, their scaling, and the turn of a pass."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pdnode.models.ropeconfig import RopeScaling


class Turn(NamedTuple):
    """Cosines and sines of one pass, [N, 1, D] each; the two halves of D are equal."""

    cosines: Tensor
    sines: Tensor


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies, [D / 2], float32. Scaling as published with Llama 3.1 ("llama3") and in
    arXiv 2309.00071 ("yarn")."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / theta**steps
    if scaling.kind == "none":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "yarn":
        keep = _yarn_kept(head_dim, theta, scaling)
        return (1 - keep) * plain / scaling.factor + keep * plain
    assert scaling.kind == "llama3", scaling.kind
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_context * plain / (2 * math.pi)  # in the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretch fully, 1: keep
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn_kept(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """[D / 2]: 1 for frequencies that are kept, 0 for those that are stretched fully."""

    def place(turns: float) -> float:
        """The frequency that makes so many turns in the original context."""
        ratio = scaling.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.whole_dims:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    # 0.001: as published, where the two meet.
    return 1 - ((steps - first) / (last - first or 0.001)).clamp(0.0, 1.0)


class Rope:
    """The rotary positions of a model whose heads turn `dim` of their numbers."""

    def __init__(self, dim: int, theta: float, scaling: RopeScaling, device: torch.device) -> None:
        """`device`: where positions come from."""
        self._frequencies = inverse_frequencies(dim, theta, scaling).to(device)
        self._amplitude = scaling.amplitude

    def turn(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """`positions` [N] int64."""
        angles = torch.outer(positions.float(), self._frequencies).repeat(1, 2).unsqueeze(1)
        cosines, sines = angles.cos() * self._amplitude, angles.sin() * self._amplitude
        return Turn(cosines.to(dtype), sines.to(dtype))


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Rotary positions on [N, heads, D]; the halves of a head are the pairs' two parts."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * turn.cosines + swapped * turn.sines
