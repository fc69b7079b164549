"""The steps of a peer link, in the order of core/link.py, and what bounds them."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    NEW = "new"
    AUTH = "auth"
    PROOF = "proof"
    HELLO = "hello"
    ADMIT = "admit"
    OFFER = "offer"
    OPENING = "opening"
    ANSWER = "answer"
    CONNECT = "connect"
    PROBE = "probe"
    UP = "up"
    FENCING = "fencing"
    CLOSED = "closed"


OVER = frozenset({State.FENCING, State.CLOSED})
SESSION_STEPS = frozenset(
    {State.OFFER, State.OPENING, State.ANSWER, State.CONNECT, State.PROBE, State.UP}
)
HANDSHAKE = frozenset(State) - OVER - {State.NEW, State.UP}


@dataclass(frozen=True, slots=True)
class LinkSettings:
    token: bytes | None
    heartbeat_s: float
    link_lost_s: float
    step_timeout_s: float  # for each step of the handshake
    stall_s: float  # busy without progress for so long is reported
    both_connect: bool = False  # FI_EP_RDM: the prefill node needs the decode node's endpoints too
