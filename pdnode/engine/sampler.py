"""Drawing the next token. A draw depends on its logits, its request's seed and its number alone."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdnode.engine.protocol import LogitChanges, Sampling

Sampler = Callable[[Tensor, Sequence[Sampling]], list["Draw"]]
"""Draws one token for each row of logits [B, vocabulary] float32; as `sample_each`."""

LEAST_TEMPERATURE = 1e-30
"""What is below counts as this: the likeliest token is drawn either way. Dividing by less ends in
infinities, whose differences are not numbers."""

_SCORED_ROWS = 64
"""Rows whose logits are there at once: 32 MiB for a vocabulary of 128 k."""


class Draw(NamedTuple):
    """A token and its log probability under the model: log-softmax of the raw logits.

    `top`: (token, log probability) of the likeliest, as many as the sampling asks for.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def uniform(*, seed: int, draw: int) -> float:
    """Number `draw` of the request with `seed`, in [0, 1): the same in any batch and process."""
    packed = struct.pack("<QQ", seed & (1 << 64) - 1, draw)
    word = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    return (word >> 11) * 2.0**-53


def sample(logits: Tensor, sampling: Sampling) -> Draw:
    """Draw from `logits` [vocabulary] float32, which are left as they are.

    First the changes, then what is banned. Greedy takes the lowest id among equals. Otherwise:
    temperature, then top-k, then the smallest set of likely tokens whose probability reaches top-p,
    then one uniform number. Log probabilities know of none of this.
    FloatingPointError if the logits are not finite.
    """
    check_finite(logits)
    allowed = restricted(logits, sampling)
    token = int(allowed.argmax()) if sampling.temperature == 0 else _draw(allowed, sampling)
    total = logits.logsumexp(dim=0)
    top = likeliest(logits.unsqueeze(0), total.unsqueeze(0), sampling.logprobs)[0]
    return Draw(token, float(logits[token] - total), top)


def sample_each(logits: Tensor, samplings: Sequence[Sampling]) -> list[Draw]:
    """`sample` for each row of `logits` [B, vocabulary]."""
    return [sample(row, sampling) for row, sampling in zip(logits, samplings, strict=True)]


def check_finite(logits: Tensor) -> None:
    """FloatingPointError if they are not."""
    if not bool(torch.isfinite(logits).all()):
        raise FloatingPointError("logits are not finite")


def restricted(logits: Tensor, sampling: Sampling) -> Tensor:
    """`logits` [vocabulary] with the changes, and -inf where a token is banned; a copy if any."""
    allowed = logits
    if sampling.changes is not None:
        allowed = changed(logits, sampling.changes)
    if sampling.banned:
        allowed = logits.clone() if allowed is logits else allowed
        allowed[torch.tensor(sampling.banned, device=logits.device)] = -torch.inf
    return allowed


def changed(logits: Tensor, changes: LogitChanges) -> Tensor:
    """A copy of `logits` [vocabulary] with the repetition penalty, then the additions. Finite: a
    tiny penalty makes logits as large as they can be."""
    out = logits.clone()
    repeated = _unpacked(changes.repeated, torch.int32, logits.device).long()
    if len(repeated):
        of_repeated = out[repeated]
        divided = of_repeated / changes.repetition
        out[repeated] = torch.where(of_repeated > 0, divided, of_repeated * changes.repetition)
    biased = _unpacked(changes.biased, torch.int32, logits.device).long()
    if len(biased):
        out[biased] += _unpacked(changes.bias, torch.float32, logits.device)
    most = torch.finfo(out.dtype).max
    return out.clamp_(-most, most)


def score(
    hidden: Tensor, targets: list[int], top: int, logits: Callable[[Tensor], Tensor]
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Log probabilities of `targets`, the tokens that follow the rows of `hidden` [N, E], and the
    `top` likeliest (token, log probability) in the place of each. `logits`: rows [n, E] to float32
    [n, vocabulary].
    """
    found: list[float] = []
    tops: list[list[tuple[int, float]]] = []
    for first in range(0, len(targets), _SCORED_ROWS):
        part = torch.tensor(targets[first : first + _SCORED_ROWS], device=hidden.device)
        rows = logits(hidden[first : first + len(part)])
        totals = rows.logsumexp(dim=1)
        found += (rows.gather(1, part.unsqueeze(1)).squeeze(1) - totals).tolist()
        tops += likeliest(rows, totals, top)
    return found, tops


def likeliest(rows: Tensor, totals: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` likeliest (token, log probability) of each row of logits; `totals`: their
    logsumexp."""
    if not count:
        return [[] for _ in range(len(rows))]
    values, ids = rows.topk(min(count, rows.shape[1]), dim=1)
    logprobs = values - totals.unsqueeze(1)
    return [
        list(zip(of_ids, of_logprobs, strict=True))
        for of_ids, of_logprobs in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


def _unpacked(data: bytes, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A copy, because torch warns of memory that cannot be written to; it refuses an empty one.
    found = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return found.to(device)


def _draw(logits: Tensor, sampling: Sampling) -> int:
    assert sampling.temperature > 0, sampling.temperature
    temperature = max(sampling.temperature, LEAST_TEMPERATURE)
    scaled = logits.double() / temperature
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
