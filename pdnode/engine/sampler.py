"""Drawing the next token. A draw depends on its logits, its request's seed and its number alone."""

import hashlib
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from pdnode.engine.protocol import Sampling


class Draw(NamedTuple):
    """A token and its log probability under the model: log-softmax of the raw logits."""

    token: int
    logprob: float


def uniform(*, seed: int, draw: int) -> float:
    """Number `draw` of the request with `seed`, in [0, 1): the same in any batch and process."""
    packed = struct.pack("<QQ", seed & (1 << 64) - 1, draw)
    word = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    return (word >> 11) * 2.0**-53


def sample(logits: Tensor, sampling: Sampling) -> Draw:
    """Draw from `logits` [vocabulary] float32, which are left as they are.

    Greedy takes the lowest id among equals. Otherwise: temperature, then top-k, then the smallest
    set of likely tokens whose probability reaches top-p, then one uniform number.
    FloatingPointError if the logits are not finite.
    """
    if not bool(torch.isfinite(logits).all()):
        raise FloatingPointError("logits are not finite")
    allowed = logits
    if sampling.banned:
        allowed = logits.clone()
        allowed[torch.tensor(sampling.banned)] = -torch.inf
    token = int(allowed.argmax()) if sampling.temperature == 0 else _draw(allowed, sampling)
    return Draw(token, float(logits[token] - logits.logsumexp(dim=0)))


def _draw(logits: Tensor, sampling: Sampling) -> int:
    assert sampling.temperature > 0, sampling.temperature
    scaled = logits.double() / sampling.temperature
    ids: Tensor | None = None
    if sampling.top_k or sampling.top_p < 1:
        most = min(sampling.top_k or len(scaled), len(scaled))
        scaled, ids = scaled.topk(most)
    weights = (scaled - scaled.max()).exp()
    mass = weights.cumsum(dim=0)
    if sampling.top_p < 1:
        # A token stays if what is likelier than it has not reached top_p yet; the first one always.
        stays = int((mass - weights < sampling.top_p * mass[-1]).sum())
        mass = mass[: max(stays, 1)]
    # Right of all equal entries: tokens of weight zero are never drawn.
    point = uniform(seed=sampling.seed, draw=sampling.draw) * float(mass[-1])
    place = int(torch.searchsorted(mass, point, right=True))
    place = min(place, len(mass) - 1)
    return place if ids is None else int(ids[place])
