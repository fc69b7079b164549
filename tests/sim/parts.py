"""What a core of the simulator holds: sessions with a part per device group, and transfers."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.sim.wires import Connection, Pair

SCRATCH = -1  # the region that probes write to


@dataclass(slots=True, eq=False)
class Part:
    """A device group's part of a session. `registered`: by NIC, the key of each region."""

    registered: dict[int, dict[int, int]] = field(default_factory=dict)
    writable: tuple[int, ...] = ()  # regions that a NIC is to have when it is opened
    remote: dict[int, dict[int, int]] = field(default_factory=dict)  # rank → the peer's NIC → key
    closed: bool = False  # by the fence of the whole session
    fences: int = 0  # asked for and not done
    waiting: list[Callable[[], None]] = field(default_factory=list)  # until they are


@dataclass(slots=True, eq=False)
class Session:
    number: int
    token: bytes
    connections: dict[Pair, Connection] = field(default_factory=dict)  # by (local, remote)
    parts: dict[int, Part] = field(default_factory=dict)  # by device group
    opening: int = 0  # NICs that are still to be registered
    # Region → NIC → key; of a NIC that was fenced what it had last, as in the native core.
    descriptors: dict[int, dict[int, int]] = field(default_factory=dict)
    carried: set[tuple[int, int]] = field(default_factory=set)  # (region, group)


@dataclass(slots=True, eq=False)
class Due:
    """One write of a transfer, until it is posted."""

    group: int  # whose thread posts it
    counter: int  # −1: due now
    needs: int
    source_rank: int
    target_rank: int
    layer: int
    heads: tuple[int, int, int]  # first cell at the source, first at the target, how many
    pages: list[tuple[int, int]]  # (source, target)


@dataclass(slots=True, eq=False)
class Transfer:
    number: int
    session: Session
    immediate: int
    key: str = ""
    todo: list[Due] = field(default_factory=list)
    coming: int = 0  # programs on their way to the thread of a group
    groups: set[int] = field(default_factory=set)  # that have had programs
    outstanding: int = 0
    finished: bool = False
    stopped: bool = False
    failed: bool = False
    ended: bool = False
    errors: set[Pair] = field(default_factory=set)  # (local, remote)


@dataclass(slots=True)
class Counter:
    generation: int
    expected: int
    count: int = 0
    told: bool = False
