"""`pdnode bench plan`: what the plan and the layer programs of one long prompt cost.

The real messenger of a prefill node gets a dispatch of 131,072 tokens from a peer of as many ranks,
and the whole prompt is one chunk. Timed is what it does before the pass: routes, spans, programs,
and handing them to a fabric that takes them and posts nothing.
"""

import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.pages import PagePool
from pdnode.core.schedule import Chunk
from pdnode.daemon.collector import calm_collector
from pdnode.fabric._native import Event, Fabric
from pdnode.messenger.dispatch import DispatchLimits
from pdnode.messenger.gate import PageGate
from pdnode.messenger.groups import SourceGroup, SourceRegion
from pdnode.messenger.push import PushMessenger
from pdnode.messenger.session import PeerSession
from pdnode.obs.records import Records
from pdnode.types import BootId, NodeId, Role, Run, SequenceId, SessionId

PROMPT_TOKENS = 131_072
LAYERS = 80
RANKS = 8
PAGE_TOKENS = 16
PAGES = PROMPT_TOKENS // PAGE_TOKENS
_KINDS = (("gqa", 8, 128), ("mla", 1, 576))  # kind, KV heads, head dimension


class Cell(msgspec.Struct, frozen=True):
    """Times in milliseconds. `pages`: one run on both sides, or 8,192 of which none is beside the
    next."""

    kind: str
    pages: str
    programs: int
    spans: int
    p50_ms: float
    p99_ms: float


class Report(msgspec.Struct, frozen=True):
    prompt_tokens: int
    layers: int
    ranks: tuple[int, int]
    page_tokens: int
    rounds: int
    results: list[Cell]
    growth_mib: float  # of this process's resident memory, from before the first plan to the most


_SPANS = 14  # where Fabric.submit has them


class _NullFabric:
    """Counts what it is given."""

    def __init__(self) -> None:
        self.programs = 0
        self.spans = 0

    def open_transfer(self, transfer: int, session: int, immediate: int) -> None: ...
    def finish(self, transfer: int) -> None: ...
    def submit(self, *program: object) -> None:
        self.programs += 1
        self.spans += len(cast(tuple[object, ...], program[_SPANS]))

    def close_transfer(self, transfer: int) -> list[tuple[int, ...]]:
        return []


@dataclass(slots=True)
class _Schedule:
    """Keeps the callbacks of the sequence that was begun last."""

    planned: Callable[[Chunk, int], None] | None = None
    computed: Callable[[Chunk], None] | None = None

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
        self.planned, self.computed = planned, computed
        return SequenceId(1)

    def remove(self, sequence: SequenceId) -> None: ...
    def waiting_tokens(self) -> int:
        return 0


class _Outbox:
    def put(self, frame: wire.Frame) -> None: ...


@dataclass(frozen=True, slots=True)
class _Drained:
    """As `_native.Event`."""

    transfer: int
    kind: str = "drained"


class _Node:
    """A prefill node and its peer, both of RANKS ranks. `single`: no page is beside the next."""

    def __init__(self, kind: str, kv_heads: int, head_dim: int, *, single: bool) -> None:
        geometry = KvGeometry(
            kind, LAYERS, kv_heads, head_dim, PAGE_TOKENS, "bfloat16", RANKS, 2 * PAGES
        )
        self.fabric, self._schedule = _NullFabric(), _Schedule()
        pool = PagePool(geometry.pages)
        if single:
            pool.reserve(geometry.pages)
            for page in range(0, geometry.pages, 2):
                pool.release((Run(page, 1),))
        regions = tuple(SourceRegion(rank, 0) for rank in range(RANKS))
        self._push = PushMessenger(
            geometry=geometry,
            limits=DispatchLimits(2, PROMPT_TOKENS, 1),
            fabric=cast(Fabric, self.fabric),
            groups=[SourceGroup(PageGate(pool, geometry.pages), self._schedule, regions)],
            peer=PeerConfig(),
            drop_link=_drop_link,
            records=Records(),
            clock=time.monotonic,
        )
        self._session = PeerSession(
            session=SessionId(1),
            node=NodeId("peer"),
            boot=BootId("peer"),
            role=Role.DECODE,
            hello=cast(wire.Hello, None),  # the messenger does not look at it
            geometry=geometry,
            regions={rank: rank for rank in range(RANKS)},
            pairs=((0, 0),),
            outbox=_Outbox(),
        )
        step = 2 if single else PAGES
        count = 1 if single else PAGES
        pages = [wire.PageRun(page, count) for page in range(0, step * PAGES // count, step)]
        self._dispatch = wire.Dispatch(
            "peer:1", "r", [1] * (PROMPT_TOKENS - 1), pages, 0, 1 << 20, -1, 30.0, 0
        )
        self._rounds = 0

    def plan(self) -> tuple[float, float]:
        """(seconds, resident MiB while the programs are there) of one request's plan."""
        self._push.session_frame(self._session, self._dispatch)
        assert self._schedule.planned is not None
        assert self._schedule.computed is not None
        chunk = Chunk(SequenceId(1), 0, PROMPT_TOKENS - 1, samples=False, last=True, number=0)
        began = time.perf_counter()
        self._schedule.planned(chunk, 0)
        took_s = time.perf_counter() - began
        resident = _resident_mib()
        self._schedule.computed(chunk)
        self._rounds += 1
        self._push.fabric_event(cast(Event, _Drained(self._rounds)))
        assert self._push.open_pushes == 0
        return took_s, resident


def run(*, rounds: int) -> Report:
    """A few seconds of one core."""
    nodes = [
        (kind[0], "single" if single else "run", _Node(*kind, single=single))
        for kind in _KINDS
        for single in (False, True)
    ]
    calm_collector()
    before = most = _resident_mib()
    results = []
    for kind, pages, node in nodes:
        times_s = []
        for _ in range(rounds):
            took_s, resident = node.plan()
            times_s.append(took_s)
            most = max(most, resident)
        cuts = statistics.quantiles(times_s, n=100, method="inclusive")
        programs, spans = node.fabric.programs // rounds, node.fabric.spans // rounds
        p50_ms, p99_ms = (round(1e3 * cuts[at], 3) for at in (49, 98))
        results.append(Cell(kind, pages, programs, spans, p50_ms, p99_ms))
    return Report(
        PROMPT_TOKENS, LAYERS, (RANKS, RANKS), PAGE_TOKENS, rounds, results, round(most - before, 2)
    )


def as_json(report: Report) -> str:
    return msgspec.json.encode(report).decode()


def as_table(report: Report) -> str:
    lines = [
        f"{report.prompt_tokens} tokens, {report.layers} layers, {RANKS} ranks to {RANKS}, "
        f"{report.page_tokens} tokens a page, {report.rounds} rounds",
        f"{'kind':<6}{'pages':<8}{'programs':>9}{'spans':>8}{'p50 ms':>9}{'p99 ms':>9}",
    ]
    lines += [
        f"{one.kind:<6}{one.pages:<8}{one.programs:>9}{one.spans:>8}{one.p50_ms:>9.3f}"
        f"{one.p99_ms:>9.3f}"
        for one in report.results
    ]
    lines.append(f"resident memory grew by {report.growth_mib:.2f} MiB")
    return "\n".join(lines)


def _resident_mib() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * mmap.PAGESIZE / (1 << 20)


def _drop_link(session: PeerSession, text: str) -> None:
    raise AssertionError(f"{session.node}: {text}")
