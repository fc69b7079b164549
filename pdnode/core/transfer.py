"""The vocabulary of a transfer: why it fails, and what its two state machines ask for.

Per dispatch there are two machines: `Grant` (core/grant.py) on the decode node and `Push`
(core/push.py) on the prefill node. They decide when pages may be read, retried, replayed and
reused; everything that acts (fabric, link, scheduler, page pool) stands outside and carries out the
effects that their methods return. Pure: time comes in as `now`, in seconds of a monotonic clock.

The rule behind both (ARCHITECTURE.md, Invariants): a page that another node may write to is free
only after that node has said `drained`, or after this node has fenced it. Nothing is ever freed by
time: when time runs out the link is dropped, and the fence that follows frees.

Loss of a NIC pair, the one exchange of more than two steps. The prefill saw writes fail over p:

    P  fences p, NicDown(p)         may come from several requests, is sent once per pair
    D  fences p, NicFenced(p), then for every grant of the session: Regrant (its pages are not
       complete) or Cancel (they are: nobody needs a replay)
    P  NicFenced(p): what failed over p cannot land any more
    P  Regrant: stops the old transfer, and *when nothing of it can land any more* opens a new
       one under the new immediate and replays everything

The order of the link makes this complete: whoever failed over p before it heard NicFenced(p) hears
Regrant or Cancel after it. The replay waits for the old transfer because a late old write, although
it carries the same bytes, could undo what the decode node has written into the last page since.
"""

from dataclasses import dataclass
from enum import StrEnum

from pdnode.core import wire
from pdnode.core.plan import Program
from pdnode.types import TransferId

Pair = tuple[int, int]
"""One connection: (decode NIC, prefill NIC), as on the wire."""


class FailCause(StrEnum):
    """Why an attempt ended; travels in wire.Failed and decides status and retry."""

    OVERLOADED = "overloaded"
    DRAINING = "draining"
    REJECTED = "rejected"  # the dispatch does not fit the geometry: a fault, never retried there
    ENGINE = "engine"
    WRITE = "write"
    UNKNOWN = "unknown"  # a regrant for a request that the prefill has forgotten
    OVERSHOOT = "overshoot"
    STALLED = "stalled"
    LINK_LOST = "link_lost"
    SILENT = "silent"  # the link is lost because the peer was not heard for `link_lost_s`
    SHORT = "short"  # drained, but the count never came
    CORRUPT = "corrupt"  # pages do not hold what was sent: no other peer is asked


@dataclass(frozen=True, slots=True)
class Send:
    """Send this frame to the peer of the request."""

    frame: wire.Frame


@dataclass(frozen=True, slots=True)
class Enter:
    """Decode: every page is there; the sequence enters the schedule and reads them."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Decode: this attempt gives no answer. `retry`: nothing was read, so another may try."""

    cause: FailCause
    text: str
    retry: bool


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Decode: nobody reads the pages any more, but the peer may still write to them."""


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody reads or writes: pages (and on decode all slots) go back to their pools."""


@dataclass(frozen=True, slots=True)
class FencePairs:
    """Decode: fence these connections, then answer wire.NicFenced for each."""

    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class DropLink:
    """Drop the link to this peer: the fence that follows frees what is owed."""

    text: str


@dataclass(frozen=True, slots=True)
class Open:
    """Prefill: begin a transfer under this immediate."""

    transfer: TransferId
    immediate: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Prefill: hand the layer programs of one chunk to the core. `base` None: all is due now."""

    transfer: TransferId
    chunk: int
    base: int | None
    programs: tuple[Program, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Prefill: no further programs will come."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Stop:
    """Prefill: post nothing more of this transfer."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class PairDown:
    """Prefill: fence this pair here and send wire.NicDown, unless that was done before."""

    pair: Pair
    text: str


@dataclass(frozen=True, slots=True)
class Unschedule:
    """Prefill: take the sequence out of the schedule, or give up its wait for pages."""


Effect = (
    Send
    | Enter
    | Lost
    | Quarantine
    | Free
    | FencePairs
    | DropLink
    | Open
    | Submit
    | Finish
    | Stop
    | PairDown
    | Unschedule
)
