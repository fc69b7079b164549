"""Parts for messenger tests: a fabric that records calls, link ends that record frames."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pdnode.core import wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.schedule import Chunk
from pdnode.fabric._native import FabricError
from pdnode.messenger.digests import Digester
from pdnode.messenger.session import PeerSession
from pdnode.types import BootId, NodeId, Role, Run, SequenceId, SessionId

Pair = tuple[int, int]
PAGE_TOKENS = 4
LAYERS = 2


def geometry(*, pages: int, tp: int = 1) -> KvGeometry:
    """2 KV heads of 8 floats: a head of a page is 256 bytes."""
    return KvGeometry("gqa", LAYERS, 2, 8, PAGE_TOKENS, "float32", tp, pages)


@dataclass(slots=True)
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class FabricEvent:
    """As `_native.Event`; pairs as (local, remote) NIC."""

    kind: str
    slot: int = 0
    generation: int = 0
    transfer: int = 0
    text: str = ""
    pairs: list[Pair] = field(default_factory=list)


class RecordingFabric:
    """Takes any call of `_native.Fabric` that a messenger makes, and answers nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rows: dict[int, list[tuple[int, ...]]] = {}  # what close_transfer returns
        self.refuse: set[str] = set()  # names of calls that raise FabricError
        self.landed: dict[int, int] = {}  # by slot: what `counted` returns

    def _record(self, name: str, *arguments: object) -> None:
        if name in self.refuse:
            raise FabricError(f"{name}: refused")
        self.calls.append((name, *arguments))

    def take(self) -> list[tuple[Any, ...]]:
        """What was called since the last `take`."""
        calls, self.calls = self.calls, []
        return calls

    def arm(self, slot: int, generation: int, session: int, expected: int) -> None:
        self._record("arm", slot, generation, session, expected)

    def disarm(self, slot: int) -> None:
        self._record("disarm", slot)

    def counted(self, slot: int) -> int:
        return self.landed.get(slot, 0)

    def fence(self, session: int, pair: Pair | None = None) -> None:
        self._record("fence", session, pair)

    def open_transfer(self, transfer: int, session: int, immediate: int) -> None:
        self._record("open_transfer", transfer, session, immediate)

    def submit(self, *arguments: object) -> None:
        self._record("submit", *arguments)

    def finish(self, transfer: int) -> None:
        self._record("finish", transfer)

    def stop(self, transfer: int) -> None:
        self._record("stop", transfer)

    def close_transfer(self, transfer: int) -> list[tuple[int, ...]]:
        self._record("close_transfer", transfer)
        return self.rows.get(transfer, [])


@dataclass(slots=True, eq=False)
class Outbox:
    """Frames as the peer would decode them."""

    frames: list[wire.Frame] = field(default_factory=list)

    def put(self, frame: wire.Frame) -> None:
        self.frames.append(wire.decode(wire.encode(frame)))

    def take(self) -> list[wire.Frame]:
        frames, self.frames = self.frames, []
        return frames


def session(
    number: int,
    *,
    peer: Role,
    peer_geometry: KvGeometry,
    pairs: Iterable[Pair],
    boot: str = "boot",
    node: str = "peer",
) -> tuple[PeerSession, Outbox]:
    outbox = Outbox()
    end = PeerSession(
        session=SessionId(number),
        node=NodeId(node),
        boot=BootId(boot),
        role=peer,
        hello=None,  # type: ignore[arg-type]  # the messengers do not look at it
        geometry=peer_geometry,
        regions={},
        pairs=tuple(pairs),
        outbox=outbox,
    )
    return end, outbox


@dataclass(slots=True, eq=False)
class _Begun:
    tokens: list[int]
    pages: tuple[Run, ...]
    peer: str
    planned: Callable[[Chunk, int], None]
    computed: Callable[[Chunk], None]


class RecordingSchedule:
    """The step loop as PushMessenger needs it; `plan` and `compute` are called by the test."""

    def __init__(self) -> None:
        self.begun: dict[SequenceId, _Begun] = {}
        self.removed: list[SequenceId] = []
        self._chunks: dict[SequenceId, list[Chunk]] = {}

    def begin_prefill(
        self,
        *,
        tokens: list[int],
        pages: tuple[Run, ...],
        peer: str,
        priority: int,
        planned: Callable[[Chunk, int], None],
        computed: Callable[[Chunk], None],
    ) -> SequenceId:
        number = SequenceId(len(self.begun) + 1)
        self.begun[number] = _Begun(list(tokens), pages, peer, planned, computed)
        self._chunks[number] = []
        return number

    def remove(self, sequence: SequenceId) -> None:
        self.removed.append(sequence)

    def waiting_tokens(self) -> int:
        return 0

    def plan(self, number: int, end: int, base: int) -> None:
        """A chunk up to token `end` is about to run."""
        sequence = SequenceId(number)
        begun, chunks = self.begun[sequence], self._chunks[sequence]
        start = chunks[-1].end if chunks else 0
        last = end == len(begun.tokens)
        chunk = Chunk(sequence, start, end, samples=False, last=last, number=len(chunks))
        chunks.append(chunk)
        begun.planned(chunk, base)

    def compute(self, number: int) -> None:
        """The chunk planned last has run."""
        sequence = SequenceId(number)
        self.begun[sequence].computed(self._chunks[sequence][-1])


class HeldDigester(Digester):
    """Digests are the layer and the page's mark; jobs wait for `go`."""

    def __init__(self, geometry: KvGeometry) -> None:
        super().__init__(cast(Any, None), geometry)
        self.jobs: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self.marks: dict[int, int] = {}  # by page, 0: as it should be

    def digest(self, region: int, offset: int, length: int, pages: Sequence[int]) -> bytes:
        return b"".join(
            (layer | self.marks.get(page, 0) << 32).to_bytes(8, "little")
            for page in pages
            for layer in range(self.geometry.layers)
        )

    def run(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.jobs.append((job, done))

    def go(self) -> None:
        job, done = self.jobs.popleft()
        done(job())
