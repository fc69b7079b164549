"""Multi-head latent attention of one layer (DeepSeek-V2, arXiv 2405.04434, section 2.1).

All KV of a token is one latent, normalized, and one rotary key that all heads share. Every rank
computes and keeps both whole; only what unfolds them is cut, by heads. Letters as in `passes`, and
E hidden size, N tokens of a pass, Rq rank of the queries.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pdnode.models.config import LatentConfig, ModelConfig
from pdnode.models.norm import rms_norm
from pdnode.models.parts import part_of
from pdnode.models.passes import LatentUp, PassAttention
from pdnode.models.ranks import Ranks
from pdnode.models.rope import Turn, rotate
from pdnode.models.tensors import Take, Wanted, columns, rows, scaled

# Of the two inner norms: the published model does not take it from its configuration.
_INNER_EPSILON = 1e-6


class LatentAttention:
    """`query` [h * (Q + P), Rq or E], `down` [R + P, E], `output` [E, h * V]."""

    @staticmethod
    def wanted(config: ModelConfig, ranks: Ranks) -> dict[str, Wanted]:
        latent, hidden = _of(config), config.hidden
        heads = part_of(config.heads, rank=ranks.rank, tp=ranks.tp)

        def by_heads(dim: int, width: int) -> Wanted:
            return rows((config.heads * dim, width), scaled(heads, dim))

        if latent.query_rank:
            found = {
                "q_a_proj.weight": Wanted((latent.query_rank, hidden)),
                "q_a_layernorm.weight": Wanted((latent.query_rank,)),
                "q_b_proj.weight": by_heads(config.head_dim, latent.query_rank),
            }
        else:
            found = {"q_proj.weight": by_heads(config.head_dim, hidden)}
        joint = latent.kv_rank + latent.rope_dim
        found |= {
            "kv_a_proj_with_mqa.weight": Wanted((joint, hidden)),
            "kv_a_layernorm.weight": Wanted((latent.kv_rank,)),
            "kv_b_proj.weight": by_heads(latent.plain_dim + latent.value_dim, latent.kv_rank),
            "o_proj.weight": columns(
                (hidden, config.heads * latent.value_dim), scaled(heads, latent.value_dim)
            ),
        }
        if config.attention_bias:
            found |= {"kv_a_proj_with_mqa.bias": Wanted((joint,)), "o_proj.bias": Wanted((hidden,))}
            if latent.query_rank:
                found["q_a_proj.bias"] = Wanted((latent.query_rank,))
        return found

    def __init__(self, config: ModelConfig, ranks: Ranks, take: Take) -> None:
        self._ranks = ranks
        self._latent = latent = _of(config)
        self._head_dim = config.head_dim
        biased = config.attention_bias

        def bias(name: str) -> Tensor | None:
            return take(f"{name}.bias") if biased else None

        if latent.query_rank:
            self._query_down = take("q_a_proj.weight")
            self._query_down_bias = bias("q_a_proj")
            self._query_norm = take("q_a_layernorm.weight")
        query = take("q_b_proj.weight" if latent.query_rank else "q_proj.weight")
        query = query.view(-1, config.head_dim, query.shape[1])
        self._query = self._halves(query).flatten(0, 1)
        self._down = self._halves(take("kv_a_proj_with_mqa.weight"))
        down_bias = bias("kv_a_proj_with_mqa")
        self._down_bias = None
        if down_bias is not None:
            self._down_bias = self._halves(down_bias.unsqueeze(1)).squeeze(1)
        self._norm = take("kv_a_layernorm.weight")
        up = take("kv_b_proj.weight").view(-1, latent.plain_dim + latent.value_dim, latent.kv_rank)
        self._up = LatentUp(
            keys=up[:, : latent.plain_dim].contiguous(),
            values=up[:, latent.plain_dim :].contiguous(),
            scale=config.attention_scale,
        )
        self._output = take("o_proj.weight")
        self._output_bias = bias("o_proj")

    def run(self, normed: Tensor, turn: Turn, layer: int, attention: PassAttention) -> Tensor:
        """[N, E] to [N, E], summed over the ranks: then all of them have stored this layer's KV."""
        plain, rank = self._latent.plain_dim, self._latent.kv_rank
        queries = functional.linear(self._squeezed(normed), self._query)
        queries = queries.view(len(normed), -1, self._head_dim)
        queries = torch.cat((queries[..., :plain], rotate(queries[..., plain:], turn)), dim=-1)
        joint = functional.linear(normed, self._down, self._down_bias)
        keys = rotate(joint[:, None, rank:], turn).squeeze(1)
        latents = torch.cat((rms_norm(joint[:, :rank], self._norm, _INNER_EPSILON), keys), dim=-1)
        mixed = attention.run_latent(layer, queries, latents, self._up)
        out = self._ranks.sum(functional.linear(mixed.flatten(1), self._output))
        return out if self._output_bias is None else out + self._output_bias

    def _squeezed(self, normed: Tensor) -> Tensor:
        """[N, E] to [N, Rq], where queries have a rank of their own."""
        if not self._latent.query_rank:
            return normed
        narrow = functional.linear(normed, self._query_down, self._query_down_bias)
        return rms_norm(narrow, self._query_norm, _INNER_EPSILON)

    def _halves(self, weight: Tensor) -> Tensor:
        """[…, rows, in] whose last rows are rotary pairs, as two halves: what `rotate` turns."""
        if not self._latent.interleaved:
            return weight
        first = weight.shape[-2] - self._latent.rope_dim
        order = torch.arange(weight.shape[-2])
        order[first:] = torch.cat((order[first::2], order[first + 1 :: 2]))
        return weight.index_select(-2, order)


def _of(config: ModelConfig) -> LatentConfig:
    assert config.latent is not None
    return config.latent
