"""The forward pass of a decoder, functional, on flat ragged batches.

Letters: N tokens of a pass, E hidden size, V vocabulary. Weights are `[out, in]`.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdnode.models.config import ModelConfig
from pdnode.models.experts import Experts
from pdnode.models.gqa import GqaAttention
from pdnode.models.mla import LatentAttention
from pdnode.models.mlp import Mlp
from pdnode.models.norm import rms_norm
from pdnode.models.parts import part_of
from pdnode.models.passes import PassAttention
from pdnode.models.ranks import Alone, Ranks
from pdnode.models.rope import Rope, Turn
from pdnode.models.tensors import Take, Wanted, rows, under


class Attention(Protocol):
    """[N, E] to [N, E], summed over the ranks. `turn`, `layer` and `attention` are the pass's."""

    def run(self, normed: Tensor, turn: Turn, layer: int, attention: PassAttention) -> Tensor: ...


class FeedForward(Protocol):
    """[N, E] to [N, E], summed over the ranks."""

    def run(self, normed: Tensor) -> Tensor: ...


class _Layer:
    """The norms are [E]."""

    def __init__(self, config: ModelConfig, number: int, ranks: Ranks, take: Take) -> None:
        self.input_norm = take("input_layernorm.weight")
        attention = under("self_attn.", take)
        self.attention: Attention = (
            LatentAttention(config, ranks, attention)
            if config.latent
            else GqaAttention(config, ranks, attention)
        )
        self.mlp_norm = take("post_attention_layernorm.weight")
        mlp = under("mlp.", take)
        self.mlp: FeedForward = (
            Experts(config, ranks, mlp)
            if config.has_experts(number)
            else Mlp(ranks, mlp, bias=config.mlp_bias)
        )


def wanted_tensors(config: ModelConfig, ranks: Ranks) -> dict[str, Wanted]:
    """Every tensor that a checkpoint of `config` has, and what this rank keeps of it."""
    hidden = config.hidden
    vocabulary = rows(
        (config.vocabulary, hidden), part_of(config.vocabulary, rank=ranks.rank, tp=ranks.tp)
    )
    found = {"model.embed_tokens.weight": vocabulary, "model.norm.weight": Wanted((hidden,))}
    if not config.tied_embeddings:
        found["lm_head.weight"] = vocabulary
    attention = LatentAttention if config.latent else GqaAttention
    for layer in range(config.layers):
        blocks = {
            "input_layernorm.": {"weight": Wanted((hidden,))},
            "post_attention_layernorm.": {"weight": Wanted((hidden,))},
            "self_attn.": attention.wanted(config, ranks),
            "mlp.": Experts.wanted(config, ranks)
            if config.has_experts(layer)
            else Mlp.wanted(hidden, config.intermediate, ranks, bias=config.mlp_bias),
        }
        found |= {
            f"model.layers.{layer}.{block}{name}": wanted
            for block, tensors in blocks.items()
            for name, wanted in tensors.items()
        }
    return found


class Decoder:
    """One rank's part of a model. Immutable."""

    def __init__(self, config: ModelConfig, take: Take, ranks: Ranks | None = None) -> None:
        """`take` gives up the tensors of `wanted_tensors`, each once."""
        self.config = config
        self._ranks = ranks or Alone()
        part = part_of(config.vocabulary, rank=self._ranks.rank, tp=self._ranks.tp)
        self._first_token = part.start
        self._embedding = take("model.embed_tokens.weight")  # [V of this rank, E]
        self._layers = [
            _Layer(config, number, self._ranks, under(f"model.layers.{number}.", take))
            for number in range(config.layers)
        ]
        self._norm = take("model.norm.weight")  # [E]
        # [V of this rank, E]
        self._head = self._embedding if config.tied_embeddings else take("lm_head.weight")
        turned = config.latent.rope_dim if config.latent else config.head_dim
        self._rope = Rope(turned, config.rope_theta, config.rope_scaling, self.device)

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    @property
    def device(self) -> torch.device:
        """Of the weights, and of all that goes in and out."""
        return self._embedding.device

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PassAttention,
        layer_done: Callable[[], None],
        *,
        kv_only: bool = False,
    ) -> Tensor:
        """Hidden states [N, E] (before the final norm) of `tokens` [N] int64 at `positions` [N].

        `attention` is planned for this pass. `layer_done` is called once per layer, after the
        attention output projection and its sum over the ranks: from then on the layer's K and V of
        this pass are final on every rank. `kv_only`: nobody wants the hidden states, so the pass
        ends with the last layer's K and V; what it returns means nothing.
        """
        hidden = self._embed(tokens)
        turn = self._rope.turn(positions, hidden.dtype)
        epsilon = self.config.rms_epsilon
        for number, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.input_norm, epsilon)
            hidden = hidden + layer.attention.run(normed, turn, number, attention)
            layer_done()
            if kv_only and number == len(self._layers) - 1:
                break
            hidden = hidden + layer.mlp.run(rms_norm(hidden, layer.mlp_norm, epsilon))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V], float32, of hidden states [N, E]. All ranks call it alike."""
        normed = rms_norm(hidden, self._norm, self.config.rms_epsilon)
        part = functional.linear(normed, self._head)
        if self._ranks.tp == 1:
            return part.float()
        # The last ranks' parts may be short; they are filled up for the exchange and cut after it.
        short = len(part_of(self.config.vocabulary, rank=0, tp=self._ranks.tp)) - part.shape[1]
        whole = self._ranks.joined(functional.pad(part, (0, short)))
        return whole[:, : self.config.vocabulary].float()

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._ranks.tp == 1:
            return self._embedding[tokens]
        places = tokens - self._first_token
        last = len(self._embedding) - 1
        elsewhere = ((places < 0) | (places > last)).unsqueeze(1)
        return self._ranks.sum(self._embedding[places.clamp(0, last)].masked_fill(elsewhere, 0.0))
