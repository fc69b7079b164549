"""How many dispatches a prefill node takes, and of whom: bounded, and fair over its peers."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdnode.messenger.session import PeerSession
from pdnode.types import NodeId, SessionId


@dataclass(slots=True)
class Places:
    """While other peers are connected, one may hold as many places as it leaves free: however much
    one of them sends, or several, the others still find some.
    """

    _sessions: set[SessionId] = field(default_factory=set)

    @property
    def shared(self) -> bool:
        return len(self._sessions) > 1

    def session_up(self, session: PeerSession) -> None:
        self._sessions.add(session.session)

    def session_lost(self, session: PeerSession) -> None:
        self._sessions.discard(session.session)

    def objection(
        self, session: PeerSession, holders: Iterable[NodeId], *, most: int
    ) -> str | None:
        """Why one more dispatch finds no place, or None. `holders`: the peer of each taken one."""
        peers = list(holders)
        taken, own = len(peers), peers.count(session.node)
        if taken >= most:
            return f"{taken} requests here, at most {most}"
        if self._sessions - {session.session} and own >= most - taken:
            return (
                f"{own} requests of {session.node} here, and {most - taken} of {most} places left"
            )
        return None
