"""What the operator has chosen to see, and how the link to the daemon is: all that a picture
depends on besides the snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdnode.obs.snapshot import Event

SCREENS = ("flow", "fabric", "topology", "queues", "peers", "events")
"""In the order of the keys 1 to 6. `detail` and `help` open on top of one of them."""

SORTS: Mapping[str, tuple[str, ...]] = {
    "flow": ("age", "rate", "progress", "peer"),
    "fabric": ("name", "rate", "peak"),
    "queues": ("age", "state", "tokens", "peer"),
    "peers": ("name", "state", "rate", "rtt"),
    "events": ("newest", "oldest", "severity"),
}
"""Orders of the lists, the default first."""

INTERVALS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

Peaks = Mapping[str, tuple[float, float]]
"""Highest (rx, tx) bytes/s by NIC that this console saw since the operator reset the peaks."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question in the last lines. `find` and `drain` take a line of text, the others a key."""

    kind: str  # find | drain | undrain | cancel
    question: str = ""
    typed: str = ""
    target: str = ""  # the request to cancel, the node to drain


@dataclass(frozen=True, slots=True)
class Stale:
    """No answer: for how long, when the next try is, how many there were, and why."""

    for_s: float
    retry_s: float
    tries: int
    cause: str


@dataclass(frozen=True, slots=True)
class View:
    """`selected` is the key of the chosen row of the screen; the first row where it is not there.

    `request` is the one that the detail screen shows. `rates_known` is off while stale.
    """

    screen: str = "flow"
    behind: str = "flow"  # what Esc goes back to
    selected: str | None = None
    request: str | None = None
    sort: str = ""
    find: str = ""
    interval_s: float = 1.0
    paused: bool = False
    readonly: bool = False
    ascii: bool = False
    recording: str | None = None
    peaks: Peaks | None = None
    prompt: Prompt | None = None
    result: str = ""
    result_bad: bool = False
    stale: Stale | None = None
    source: str = ""  # where snapshots come from, for the last line
    events: tuple[Event, ...] = ()  # oldest first; more than one snapshot holds

    @property
    def order(self) -> str:
        """How the list of this screen is sorted."""
        return self.sort or SORTS.get(self.screen, ("",))[0]
