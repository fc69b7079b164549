"""Drawing on a GPU: FlashInfer's top-k and top-p kernels, all rows of a pass at once.

FlashInfer's own draws are not taken: with per-row seeds they still depend on the row that a request
has in its batch (its documentation says so). Here a draw depends on logits, seed and number alone,
as everywhere in this engine: the kernels leave the allowed tokens with their probabilities, and one
uniform number picks in the order of token ids. So a GPU and a CPU draw from the same distribution,
but not the same tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdnode.engine.protocol import Sampling
from pdnode.engine.sampler import (
    LEAST_TEMPERATURE,
    Draw,
    check_finite,
    likeliest,
    restricted,
    uniform,
)

# Of the mass: a point never rounds up to the end of it, behind which there is no token.
_MOST = 1 - 2.0**-40


class FlashSampler:
    """engine.sampler.Sampler over the module `flashinfer`."""

    def __init__(self, flashinfer: Any) -> None:  # noqa: ANN401 - it has no types
        self._flashinfer = flashinfer

    def __call__(self, logits: Tensor, samplings: Sequence[Sampling]) -> list[Draw]:
        check_finite(logits)
        allowed = torch.stack([restricted(*pair) for pair in zip(logits, samplings, strict=True)])
        tokens = allowed.argmax(dim=1)
        warm = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
        if warm:
            rows = torch.tensor(warm, device=logits.device)
            tokens[rows] = self._draw(allowed[rows], [samplings[row] for row in warm])
        totals = logits.logsumexp(dim=1)
        logprobs = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - totals
        tops = likeliest(logits, totals, max(sampling.logprobs for sampling in samplings))
        return [
            Draw(token, logprob, top[: sampling.logprobs])
            for token, logprob, top, sampling in zip(
                tokens.tolist(), logprobs.tolist(), tops, samplings, strict=True
            )
        ]

    def _draw(self, logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
        """[B] token ids from `logits` [B, vocabulary]."""
        device, vocabulary = logits.device, logits.shape[1]
        temperatures = [max(sampling.temperature, LEAST_TEMPERATURE) for sampling in samplings]
        below = logits - logits.amax(dim=1, keepdim=True)  # so that no quotient is +infinity
        scaled = below / torch.tensor(temperatures, device=device).unsqueeze(1)
        probabilities = scaled.softmax(dim=1)
        kept = {row: s.top_k for row, s in enumerate(samplings) if 0 < s.top_k < vocabulary}
        _renormalize(self._flashinfer.top_k_renorm_probs, probabilities, kept, dtype=torch.int32)
        shares = {row: s.top_p for row, s in enumerate(samplings) if s.top_p < 1}
        _renormalize(
            self._flashinfer.top_p_renorm_probs, probabilities, shares, dtype=torch.float32
        )
        mass = probabilities.double().cumsum(dim=1)
        numbers = [uniform(seed=s.seed, draw=s.draw) for s in samplings]
        points = torch.tensor(numbers, dtype=torch.float64, device=device).clamp(max=_MOST)
        return torch.searchsorted(mass, (points * mass[:, -1]).unsqueeze(1), right=True).squeeze(1)


def _renormalize(
    kernel: Callable[..., Tensor],
    probabilities: Tensor,
    limits: dict[int, int] | dict[int, float],
    *,
    dtype: torch.dtype,
) -> None:
    """Apply `kernel` to the rows of `probabilities` that have a limit, in place."""
    if not limits:
        return
    rows = torch.tensor(list(limits), device=probabilities.device)
    values = torch.tensor(list(limits.values()), dtype=dtype, device=probabilities.device)
    probabilities[rows] = kernel(probabilities[rows], values, is_deterministic=True)
