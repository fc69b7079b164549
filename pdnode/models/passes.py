"""What a model needs of an attention back end.

Letters: N tokens of a pass, h query heads and Hr KV heads of this rank, D head dimension, R latent
dimension, Q plain and P rotary dimensions of a query, V dimensions of a value.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LatentUp:
    """How the heads of this rank unfold a latent: `keys` [h, Q, R], `values` [h, V, R].

    `scale` of the scores, before the softmax.
    """

    keys: Tensor
    values: Tensor
    scale: float


class PassAttention(Protocol):
    """Attention of one pass, already planned. Its pages are of one kind, and the model calls the
    method of that kind, once per layer, in order."""

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append `keys`, `values` [N, Hr, D] to the pages of `layer`, then attend.

        `queries` [N, h, D]; returns [N, h, D].
        """

    def run_latent(self, layer: int, queries: Tensor, latents: Tensor, up: LatentUp) -> Tensor:
        """Append `latents` [N, R + P] to the pages of `layer`, then attend.

        `queries` [N, h, Q + P], rotary part last and turned, as in `latents`; returns [N, h, V].
        """
