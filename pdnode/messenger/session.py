"""The seam between peer link and messenger: a session with one peer, and who listens to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pdnode.core.geometry import KvGeometry
from pdnode.core.wire import Frame, Heartbeat, Hello, RegionDescriptor
from pdnode.types import BootId, NodeId, Role, SessionId


@dataclass(slots=True, eq=False)
class PeerSession:
    """A session that is up, or was. Owned by the link; the messenger only reads it and sends."""

    session: SessionId
    node: NodeId
    boot: BootId
    role: Role
    hello: Hello
    geometry: KvGeometry  # of each of the peer's TP groups
    regions: Mapping[int, int]  # peer's rank → index for Fabric.submit; empty on a prefill's peer
    pairs: tuple[tuple[int, int], ...]  # connected (local NIC, remote NIC)
    # On a prefill node: the peer's NICs that reach each of its ranks, connected or not.
    carriers: Mapping[int, frozenset[int]] = field(default_factory=dict)
    # On a decode node: what goes to the peer with the next `nic_fenced` (core/carriers.py).
    lent: tuple[RegionDescriptor, ...] = ()
    groups: int = 1  # TP groups of the peer
    draining: bool = False  # the peer said Drain
    rtt_s: float = 0.0
    last_heartbeat: Heartbeat | None = None
    up: bool = True
    outbox: "Outbox" = field(kw_only=True)

    def reaching(self, rank: int) -> frozenset[int]:
        """Local NICs that are connected to one which reaches this rank of the peer."""
        there = self.carriers.get(rank)
        return frozenset(here for here, nic in self.pairs if there is None or nic in there)

    def send(self, frame: Frame) -> None:
        """Queue a frame; dropped silently once the link is gone. Never blocks, never raises."""
        if self.up:
            self.outbox.put(frame)


class Outbox(Protocol):
    def put(self, frame: Frame) -> None: ...


class SessionListener(Protocol):
    """Called on the event loop, in order. No call may block."""

    def session_up(self, session: PeerSession) -> None:
        """Hello agreed, connections probed both ways: pages may be granted."""

    def session_frame(self, session: PeerSession, frame: Frame) -> None:
        """A frame that is not the link's own (dispatch … regrant, nic_*, drain, undrain)."""

    def session_lost(self, session: PeerSession, cause: str, *, silent: bool) -> None:
        """The link is gone; the fence is on its way. Requests fail or move, no page is freed.
        `silent`: the peer was not heard for `link_lost_s`."""

    def session_fenced(self, session: PeerSession) -> None:
        """After session_lost: no byte of this peer can land any more; its pages are free."""

    def pair_lost(self, session: PeerSession, pair: tuple[int, int], cause: str) -> None:
        """One connection of a session that is up died (local, remote NIC); the link still lives."""

    def pair_fenced(self, session: PeerSession, pair: tuple[int, int]) -> None:
        """fence(session, pair), asked for by the messenger, is done."""

    def pair_up(self, session: PeerSession, pair: tuple[int, int]) -> None:
        """A pair that was lost is connected and probed again, and in `session.pairs`."""
