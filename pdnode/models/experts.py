"""A mixture of experts in the place of a feed-forward block.

Letters: N tokens of a pass, E hidden size, X experts, K experts a token, f inner dimension of an
expert on this rank. Each rank has a part of every expert, not some experts whole: then all have
the same work, whatever experts the tokens choose, and a block is one sum over the ranks.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pdnode.models.config import ExpertsConfig, ModelConfig
from pdnode.models.mlp import Mlp, gated
from pdnode.models.ranks import Ranks
from pdnode.models.tensors import Take, Wanted, under

_SHARED = "shared_experts."


class Experts:
    """`router` [X, E] and `bias` [X] are float32; an expert is `[2 * f, E]`, gate first, and
    `[E, f]`."""

    @staticmethod
    def wanted(config: ModelConfig, ranks: Ranks) -> dict[str, Wanted]:
        experts, hidden = _of(config), config.hidden
        found = {"gate.weight": Wanted((experts.count, hidden), exact=True)}
        if experts.grouped:
            found["gate.e_score_correction_bias"] = Wanted((experts.count,), exact=True)
        one = Mlp.wanted(hidden, experts.intermediate, ranks)
        for number in range(experts.count):
            found |= {f"experts.{number}.{name}": wanted for name, wanted in one.items()}
        if experts.shared_intermediate:
            shared = Mlp.wanted(hidden, experts.shared_intermediate, ranks)
            found |= {f"{_SHARED}{name}": wanted for name, wanted in shared.items()}
        return found

    def __init__(self, config: ModelConfig, ranks: Ranks, take: Take) -> None:
        self._ranks = ranks
        self._config = experts = _of(config)
        self._router = take("gate.weight")
        self._bias = take("gate.e_score_correction_bias") if experts.grouped else None
        self._experts: list[tuple[Tensor, Tensor]] = []
        for number in range(experts.count):
            gate, up, down = (
                take(f"experts.{number}.{name}_proj.weight") for name in ("gate", "up", "down")
            )
            self._experts.append((torch.cat((gate, up)), down))
        self._shared = Mlp(ranks, under(_SHARED, take)) if experts.shared_intermediate else None

    def run(self, normed: Tensor) -> Tensor:
        """[N, E] to [N, E], summed over the ranks.

        All ranks choose the same experts, because sums over the ranks are the same on each of them
        to the last bit.
        """
        scores = functional.linear(normed.float(), self._router)
        weights, chosen = choose(self._config, scores, self._bias)
        out = torch.zeros_like(normed)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == expert)
            gate_up, down = self._experts[expert]
            found = functional.linear(gated(normed[rows], gate_up), down)
            out.index_add_(0, rows, found * weights[rows, places, None].to(found.dtype))
        if self._shared is not None:
            out += self._shared.part(normed)
        return self._ranks.sum(out)


def choose(
    config: ExpertsConfig, scores: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights, experts), [N, K] each, from router scores [N, X], all float32.

    Grouped: a group stands for the sum of its two best biased scores, and the bias decides on the
    choice only, not on the weights (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    if not config.grouped:
        weights, chosen = scores.softmax(dim=-1).topk(config.per_token, dim=-1)
    else:
        assert bias is not None
        weights = scores.sigmoid()
        biased = weights + bias
        grouped = biased.view(len(scores), config.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(config.groups_per_token, dim=-1).indices, value=True)
        candidates = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = candidates.topk(config.per_token, dim=-1).indices
        weights = weights.gather(1, chosen)
    if config.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * config.scale, chosen


def _of(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None
    return config.experts
