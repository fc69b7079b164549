"""The Llama forward pass, functional, on flat ragged batches.

Letters: N tokens of a pass, E hidden size, H query heads, Hr KV heads, D head dimension. Weights
are `[out, in]`; q, k and v are one matrix, gate and up another, so that a layer is four products.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdnode.models.config import ModelConfig, RopeScaling


class PassAttention(Protocol):
    """Attention of one pass, already planned: what a model needs of an attention back end."""

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append `keys`, `values` [N, Hr, D] to the pages of `layer`, then attend.

        `queries` [N, H, D]; returns [N, H, D]. Called once per layer, in order.
        """


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; biases are None where the model has none."""

    input_norm: Tensor  # [E]
    qkv: Tensor  # [(H + 2 * Hr) * D, E]
    qkv_bias: Tensor | None
    output: Tensor  # [E, H * D]
    output_bias: Tensor | None
    mlp_norm: Tensor  # [E]
    gate_up: Tensor  # [2 * F, E], gate first
    gate_up_bias: Tensor | None
    down: Tensor  # [E, F]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embedding: Tensor  # [vocabulary, E]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [E]
    head: Tensor  # [vocabulary, E]; the embedding itself where the two are tied


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies, [D / 2], float32. Scaling as published with Llama 3.1 ("llama3")."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / theta**steps
    if scaling.kind == "none":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    assert scaling.kind == "llama3", scaling.kind
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_context * plain / (2 * math.pi)  # in the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretch fully, 1: keep
    return (1 - keep) * plain / scaling.factor + keep * plain


class Llama:
    """One rank's model. Immutable."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self.config = config
        self._weights = weights
        self._frequencies = inverse_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling
        )

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
        attention output projection: from then on the layer's K and V of this pass are final.
        `kv_only`: nobody wants the hidden states, so the pass ends with the last layer's K and V;
        what it returns means nothing.
        """
        hidden = self._weights.embedding[tokens]
        angles = torch.outer(positions.float(), self._frequencies).repeat(1, 2).unsqueeze(1)
        cosines, sines = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)  # [N, 1, D]
        for number, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attend(layer, number, hidden, cosines, sines, attention)
            layer_done()
            if kv_only and number == len(self._weights.layers) - 1:
                break
            hidden = hidden + self._mlp(layer, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocabulary], float32, of hidden states [N, E]."""
        normed = self._norm(hidden, self._weights.norm)
        return functional.linear(normed, self._weights.head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        exact = x.float()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.config.rms_epsilon)
        return weight * (exact * scale).to(x.dtype)

    def _attend(
        self,
        layer: LayerWeights,
        number: int,
        hidden: Tensor,
        cosines: Tensor,
        sines: Tensor,
        attention: PassAttention,
    ) -> Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        normed = self._norm(hidden, layer.input_norm)
        joint = functional.linear(normed, layer.qkv, layer.qkv_bias)
        joint = joint.view(len(hidden), heads + 2 * kv_heads, self.config.head_dim)
        turned = _rotate(joint[:, : heads + kv_heads], cosines, sines)
        mixed = attention.run(
            number, turned[:, :heads], turned[:, heads:], joint[:, heads + kv_heads :]
        )
        return functional.linear(mixed.flatten(1), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, layer.mlp_norm)
        gate, up = functional.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer.down, layer.down_bias)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions on [N, heads, D]; the halves of a head are the pairs' two parts."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cosines + swapped * sines
