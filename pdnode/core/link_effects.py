"""What the peer link's machine wants done: its outputs, carried out in order by the messenger."""

from dataclasses import dataclass

from pdnode.core.hello import Agreement
from pdnode.core.wire import Frame, Hello, RegionDescriptor

Pair = tuple[int, int]
"""(local NIC, remote NIC); on the wire pairs are (decode NIC, prefill NIC)."""


@dataclass(frozen=True, slots=True)
class SendFrame:
    frame: Frame


@dataclass(frozen=True, slots=True)
class Admit:
    """The peer has proved to be this node. Answer at once with `Link.admit` or `Link.refuse`.

    A decode node is asked before it says hello, because its hello replaces whatever session the
    prefill node has with it; a prefill node is asked when the hello has been found to fit.
    """

    node: str


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Register what this peer may write to; `Link.session_opened` follows."""

    token: bytes


@dataclass(frozen=True, slots=True)
class SetRemote:
    """The peer's descriptors, checked against its geometry."""

    regions: tuple[RegionDescriptor, ...]


@dataclass(frozen=True, slots=True)
class Connect:
    pair: Pair
    endpoint: bytes


@dataclass(frozen=True, slots=True)
class Probe:
    """Every pair is connected: write into the peer's scratch region over each of them.

    `answer`: after the peer's write has come. On FI_EP_RDM the prefill node cannot know otherwise
    that the decode node has taken its address, and an earlier write would come back as cancelled.
    """

    answer: bool = False


@dataclass(frozen=True, slots=True)
class SessionUp:
    pairs: tuple[Pair, ...]
    hello: Hello  # the peer's
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class Deliver:
    """A frame for the messenger; only between SessionUp and SessionLost."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class PairLost:
    pair: Pair
    cause: str


@dataclass(frozen=True, slots=True)
class PairFenced:
    """`lent`: see core/carriers.py; on a decode node, for the peer."""

    pair: Pair
    lent: tuple[RegionDescriptor, ...] = ()


@dataclass(frozen=True, slots=True)
class Carry:
    """Register the memory of these ranks with some of these NICs; `Link.carried` follows."""

    ranks: tuple[int, ...]
    nics: frozenset[int]


@dataclass(frozen=True, slots=True)
class FencePair:
    """Close this connection, of which nobody but the link knows; `Link.pair_fenced` follows."""

    pair: Pair


@dataclass(frozen=True, slots=True)
class Reopen:
    """Register this NIC, whose pair was fenced, anew; `Link.session_opened` follows."""

    nic: int
    token: bytes


@dataclass(frozen=True, slots=True)
class PairUp:
    """A NIC pair that was lost is connected and probed again."""

    pair: Pair


@dataclass(frozen=True, slots=True)
class Fence:
    """Close everything this peer can write through. Comes before SessionLost, whenever a session
    was opened, whatever the cause; `Link.session_fenced` follows."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The link is over; once per link. `refused`: the two nodes do not fit, or may not talk.
    `silent`: nothing was heard of the peer for `link_lost_s`."""

    cause: str
    refused: bool
    silent: bool = False


@dataclass(frozen=True, slots=True)
class CloseTransport:
    """Send what is queued, then close."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Last effect of a link: nothing of this peer can reach this node's memory any more."""


@dataclass(frozen=True, slots=True)
class Warn:
    text: str


Effect = (
    SendFrame
    | Admit
    | OpenSession
    | SetRemote
    | Connect
    | Probe
    | SessionUp
    | Deliver
    | PairLost
    | PairFenced
    | Carry
    | PairUp
    | FencePair
    | Reopen
    | Fence
    | SessionLost
    | CloseTransport
    | Finished
    | Warn
)
