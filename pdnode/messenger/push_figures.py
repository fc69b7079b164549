"""What a prefill node's messenger shows of itself."""

from dataclasses import dataclass, field
from typing import NamedTuple

from pdnode.core import wire
from pdnode.core.push import Push

MAX_NAMED_PEERS = 1024
"""Peers whose bytes are counted apart since start; those that come later are one, OTHER_PEERS."""

OTHER_PEERS = "others"


class OpenPush(NamedTuple):
    """A dispatch that is not over, for those who watch."""

    dispatch: wire.Dispatch
    peer: str
    push: Push
    begun_at: float


@dataclass(slots=True)
class PushFigures:
    """Counters since start."""

    accepted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    drained: int = 0
    detours: int = 0  # layer programs that went over another device group's NICs
    failures: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)  # by peer

    def add_bytes(self, peer: str, size: int) -> None:
        if peer not in self.bytes and len(self.bytes) >= MAX_NAMED_PEERS:
            peer = OTHER_PEERS
        self.bytes[peer] = self.bytes.get(peer, 0) + size
