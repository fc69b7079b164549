"""Root-mean-square normalisation."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last dimension, in float32; `weight` has that dimension."""
    exact = x.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    return weight * (exact * scale).to(x.dtype)
