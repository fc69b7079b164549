"""What a rank wants of a checkpoint: names, whole shapes, and the part that it keeps."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Take = Callable[[str], Tensor]
"""Gives the tensor of that name up; each is asked for once."""


class Wanted(NamedTuple):
    """A tensor of `shape` on disk; the rank reads `part` of dimension `dim` (None: all of it).

    `exact`: stays float32 whatever the model's dtype (numbers that decide between experts).
    """

    shape: tuple[int, ...]
    dim: int = 0
    part: range | None = None
    exact: bool = False


def rows(shape: tuple[int, ...], part: range) -> Wanted:
    """A column-parallel weight `[out, in]`, or a bias: some of the outputs."""
    return Wanted(shape, 0, part)


def columns(shape: tuple[int, ...], part: range) -> Wanted:
    """A row-parallel weight `[out, in]`: some of the inputs."""
    return Wanted(shape, 1, part)


def scaled(part: range, factor: int) -> range:
    """The rows of heads or groups `part`, `factor` rows each."""
    return range(part.start * factor, part.stop * factor)


def under(prefix: str, take: Take) -> Take:
    """`take` for the names below `prefix`."""
    return lambda name: take(f"{prefix}{name}")
