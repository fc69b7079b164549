"""One rank of a tensor-parallel group: what part of the model it holds, and what ranks exchange.

Letters: N rows, `tp` ranks. Attention heads and the inner dimension of a feed-forward block are cut
into equal parts, so that a block is two products and one sum over the ranks. Vocabulary rows are
cut as well (embedding and head): they are the largest single tensors of a model, and whoever ties
them needs one copy; the price is one more sum per pass and one gather per draw.
"""

from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """What a model needs of its group. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def tp(self) -> int: ...

    def sum(self, part: Tensor) -> Tensor:
        """`part` summed over the ranks, in place: the same on each of them to the last bit.

        When it returns, every rank has come this far.
        """

    def joined(self, part: Tensor) -> Tensor:
        """[N, w] of every rank side by side, [N, tp * w]."""

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""


class Alone:
    """The only rank of its group."""

    rank = 0
    tp = 1

    def sum(self, part: Tensor) -> Tensor:
        return part

    def joined(self, part: Tensor) -> Tensor:
        return part

    def least(self, number: int) -> int:
        return number
