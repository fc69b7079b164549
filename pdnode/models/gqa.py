"""Grouped-query attention of one layer, cut by heads.

Letters: N tokens of a pass, E hidden size, h query heads and Hr KV heads of this rank, D head
dimension. Query heads are cut into equal runs; where ranks outnumber KV heads, neighbours hold
copies of one (core/geometry).
"""

import torch
from torch import Tensor
from torch.nn import functional

from pdnode.models.config import ModelConfig
from pdnode.models.norm import rms_norm
from pdnode.models.parts import part_of
from pdnode.models.passes import PassAttention
from pdnode.models.ranks import Ranks
from pdnode.models.rope import Turn, rotate
from pdnode.models.tensors import Take, Wanted, columns, rows, scaled


class GqaAttention:
    """q, k and v are one matrix `[(h + 2 * Hr) * D, E]`; `output` is `[E, h * D]`."""

    @staticmethod
    def wanted(config: ModelConfig, ranks: Ranks) -> dict[str, Wanted]:
        dim, hidden = config.head_dim, config.hidden
        heads = part_of(config.heads, rank=ranks.rank, tp=ranks.tp)
        kv_heads = config.kv_geometry(tp=ranks.tp).rank_heads(ranks.rank)
        found = {}
        for name, total, part in (
            ("q_proj", config.heads, heads),
            ("k_proj", config.kv_heads, kv_heads),
            ("v_proj", config.kv_heads, kv_heads),
        ):
            found[f"{name}.weight"] = rows((total * dim, hidden), scaled(part, dim))
            if config.attention_bias:
                found[f"{name}.bias"] = rows((total * dim,), scaled(part, dim))
        found["o_proj.weight"] = columns((hidden, config.heads * dim), scaled(heads, dim))
        if config.attention_bias:
            found["o_proj.bias"] = Wanted((hidden,))
        if config.qk_norm:
            found |= {"q_norm.weight": Wanted((dim,)), "k_norm.weight": Wanted((dim,))}
        return found

    def __init__(self, config: ModelConfig, ranks: Ranks, take: Take) -> None:
        self._ranks = ranks
        self._epsilon = config.rms_epsilon
        self._dim = config.head_dim
        self._heads = config.heads // ranks.tp
        self._kv_heads = config.kv_geometry(tp=ranks.tp).heads_per_rank
        names = ("q_proj", "k_proj", "v_proj")
        self._qkv = torch.cat([take(f"{name}.weight") for name in names])
        self._qkv_bias: Tensor | None = None
        self._output_bias: Tensor | None = None
        if config.attention_bias:
            self._qkv_bias = torch.cat([take(f"{name}.bias") for name in names])
            self._output_bias = take("o_proj.bias")
        self._output = take("o_proj.weight")
        self._norms: tuple[Tensor, Tensor] | None = None
        if config.qk_norm:
            self._norms = (take("q_norm.weight"), take("k_norm.weight"))

    def run(self, normed: Tensor, turn: Turn, layer: int, attention: PassAttention) -> Tensor:
        """[N, E] to [N, E], summed over the ranks: then all of them have stored this layer's KV."""
        heads, turned = self._heads, self._heads + self._kv_heads
        joint = functional.linear(normed, self._qkv, self._qkv_bias)
        joint = joint.view(len(normed), -1, self._dim)
        queries_keys = joint[:, :turned]
        if self._norms is not None:
            query_norm, key_norm = self._norms
            queries_keys = torch.cat(
                (
                    rms_norm(joint[:, :heads], query_norm, self._epsilon),
                    rms_norm(joint[:, heads:turned], key_norm, self._epsilon),
                ),
                dim=1,
            )
        queries_keys = rotate(queries_keys, turn)
        mixed = attention.run(
            layer, queries_keys[:, :heads], queries_keys[:, heads:], joint[:, turned:]
        )
        out = self._ranks.sum(functional.linear(mixed.flatten(1), self._output))
        return out if self._output_bias is None else out + self._output_bias
