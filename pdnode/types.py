"""Names shared by every part: ids, roles and page runs. Imports nothing of the project."""

from enum import StrEnum
from typing import NamedTuple, NewType

NodeId = NewType("NodeId", str)
"""Operator-chosen name of a node (`[node] id`), unique in a deployment."""

BootId = NewType("BootId", str)
"""32 hex digits, random per start of the engine. Travels in every message and descriptor."""

SessionId = NewType("SessionId", int)
"""Local number of a peer session. Never sent; never used twice in one process."""

SequenceId = NewType("SequenceId", int)
"""Local number of a sequence in scheduler and worker. Never used twice in one process."""

TransferId = NewType("TransferId", int)
"""Local number of one attempt to push one request's pages. A replay has a new one."""

RequestKey = NewType("RequestKey", str)
"""`<decode boot id>:<attempt number>`: names one dispatch on the peer link, on both sides.
A retry on another peer is another key, so a late message can never hit the wrong attempt."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class WhenNoPrefill(StrEnum):
    """What a decode node does with a prompt when no prefill peer is usable."""

    LOCAL = "local"
    REFUSE = "refuse"


class Verify(StrEnum):
    """How often pages are compared with digests of what the peer wrote (`[peer] verify`)."""

    OFF = "off"
    ONCE = "once"  # before the first token
    TWICE = "twice"  # and when the request ends


class RegionKind(StrEnum):
    """Where KV pages are and how a NIC reaches them (`[kv] region`)."""

    MEMFD = "memfd"  # host memory
    STAGED = "staged"  # a GPU's, with a mirror in host memory that the NICs use
    CUMEM = "cumem"  # a GPU's, which the NICs reach by dma-buf


class Run(NamedTuple):
    """`count` neighbouring pages from page number `start` on."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count


def expand_runs(runs: tuple[Run, ...]) -> list[int]:
    """Page numbers of `runs`, in order."""
    return [page for start, count in runs for page in range(start, start + count)]


def count_pages(runs: tuple[Run, ...]) -> int:
    return sum(count for _, count in runs)
