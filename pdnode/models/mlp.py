"""The gated feed-forward block (SwiGLU) of one layer, cut along its inner dimension F."""

import torch
from torch import Tensor
from torch.nn import functional

from pdnode.models.parts import part_of
from pdnode.models.ranks import Ranks
from pdnode.models.tensors import Take, Wanted, columns, rows


class Mlp:
    """gate and up are one matrix `[2 * f, E]`, gate first; `down` is `[E, f]`; f = F / tp."""

    @staticmethod
    def wanted(hidden: int, inner: int, ranks: Ranks, *, bias: bool = False) -> dict[str, Wanted]:
        part = part_of(inner, rank=ranks.rank, tp=ranks.tp)
        found = {"down_proj.weight": columns((hidden, inner), part)}
        for name in ("gate_proj", "up_proj"):
            found[f"{name}.weight"] = rows((inner, hidden), part)
            if bias:
                found[f"{name}.bias"] = rows((inner,), part)
        if bias:
            found["down_proj.bias"] = Wanted((hidden,))
        return found

    def __init__(self, ranks: Ranks, take: Take, *, bias: bool = False) -> None:
        self._ranks = ranks
        self._gate_up = torch.cat((take("gate_proj.weight"), take("up_proj.weight")))
        self._gate_up_bias: Tensor | None = None
        self._down_bias: Tensor | None = None
        if bias:
            self._gate_up_bias = torch.cat((take("gate_proj.bias"), take("up_proj.bias")))
            self._down_bias = take("down_proj.bias")
        self._down = take("down_proj.weight")

    def run(self, normed: Tensor) -> Tensor:
        """[N, E] to [N, E], summed over the ranks."""
        out = self._ranks.sum(self.part(normed))
        return out if self._down_bias is None else out + self._down_bias

    def part(self, normed: Tensor) -> Tensor:
        """[N, E] to [N, E]: this rank's share of the sum, without the last bias."""
        return functional.linear(gated(normed, self._gate_up, self._gate_up_bias), self._down)


def gated(normed: Tensor, gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """[N, E] to [N, f]."""
    gate, up = functional.linear(normed, gate_up, bias).chunk(2, dim=-1)
    return functional.silu(gate) * up
