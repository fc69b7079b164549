"""The gated feed-forward block (SwiGLU) of one layer, cut along its inner dimension F."""

import torch
from torch import Tensor
from torch.nn import functional

from pdnode.models.config import ModelConfig
from pdnode.models.parts import part_of
from pdnode.models.ranks import Ranks
from pdnode.models.tensors import Take, Wanted, columns, rows


class Mlp:
    """gate and up are one matrix `[2 * f, E]`, gate first; `down` is `[E, f]`; f = F / tp."""

    @staticmethod
    def wanted(config: ModelConfig, ranks: Ranks) -> dict[str, Wanted]:
        hidden, inner = config.hidden, config.intermediate
        part = part_of(inner, rank=ranks.rank, tp=ranks.tp)
        found = {"down_proj.weight": columns((hidden, inner), part)}
        for name in ("gate_proj", "up_proj"):
            found[f"{name}.weight"] = rows((inner, hidden), part)
            if config.mlp_bias:
                found[f"{name}.bias"] = rows((inner,), part)
        if config.mlp_bias:
            found["down_proj.bias"] = Wanted((hidden,))
        return found

    def __init__(self, config: ModelConfig, ranks: Ranks, take: Take) -> None:
        self._ranks = ranks
        self._gate_up = torch.cat((take("gate_proj.weight"), take("up_proj.weight")))
        self._gate_up_bias: Tensor | None = None
        self._down_bias: Tensor | None = None
        if config.mlp_bias:
            self._gate_up_bias = torch.cat((take("gate_proj.bias"), take("up_proj.bias")))
            self._down_bias = take("down_proj.bias")
        self._down = take("down_proj.weight")

    def run(self, normed: Tensor) -> Tensor:
        """[N, E] to [N, E], summed over the ranks."""
        gate, up = functional.linear(normed, self._gate_up, self._gate_up_bias).chunk(2, dim=-1)
        out = self._ranks.sum(functional.linear(functional.silu(gate) * up, self._down))
        return out if self._down_bias is None else out + self._down_bias
