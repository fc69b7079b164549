"""`pdnode bench step`: what a pass costs the daemon, beside a model that computes nothing.

Requests are admitted as the API admits them. Service, gate, schedule, step loop, messengers, pages
and the frames to the worker are the real ones; the fabric takes every call and does nothing, and
the worker answers at once. On a decode node each request got its pages from a peer and draws a
token in each pass; on a prefill node as many dispatches wait, and each pass computes 512 tokens.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

import msgspec

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.pages import PagePool
from pdnode.core.request import Request
from pdnode.core.schedule import Scheduler
from pdnode.core.slots import SlotPool
from pdnode.daemon.collector import calm_collector
from pdnode.daemon.flight import Flight
from pdnode.daemon.service import NodeService
from pdnode.daemon.steps import StepLoop
from pdnode.engine.protocol import Drawn, Step, StepDone, ToDaemon
from pdnode.fabric._native import Event, Fabric
from pdnode.messenger.dispatch import DispatchLimits
from pdnode.messenger.gate import PageGate
from pdnode.messenger.groups import SourceGroup, SourceRegion
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.messenger.session import PeerSession
from pdnode.obs.records import Records
from pdnode.types import BootId, NodeId, Role, SessionId, WhenNoPrefill

LAYERS = 80
PROMPT_TOKENS = 2048
CHUNK_TOKENS = 512
PAGE_TOKENS = 64
VOCABULARY = 1 << 17
CONTEXT_TOKENS = 1 << 17
_BOOT = BootId("0" * 32)
_WARM_UP_PASSES = 10


class Took(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50: float
    p99: float
    max: float


class Report(msgspec.Struct, frozen=True):
    """`decode` and `prefill`: from an answer of the worker to the next step, its frames included,
    so while no model runs. `streams`: until every stream has taken its token, beside the model.
    `tick`: the messenger's look at its deadlines, four times a second."""

    requests: int
    passes: int
    decode: Took
    prefill: Took
    streams: Took
    tick: Took


class _NullFabric:
    """What the messengers call, and nothing comes of it."""

    def arm(self, slot: int, generation: int, session: int, expected: int) -> None: ...
    def open_transfer(self, transfer: int, session: int, immediate: int) -> None: ...
    def submit(self, *program: object) -> None: ...
    def finish(self, transfer: int) -> None: ...


@dataclass(slots=True)
class _Outbox:
    """Encodes as the link does, and keeps what the other side has to answer."""

    dispatches: list[wire.Dispatch] = field(default_factory=list)

    def put(self, frame: wire.Frame) -> None:
        wire.encode(frame)
        if isinstance(frame, wire.Dispatch):
            self.dispatches.append(frame)


@dataclass(frozen=True, slots=True)
class _Reached:
    """As `_native.Event`."""

    slot: int
    generation: int
    kind: str = "reached"


@dataclass(frozen=True, slots=True)
class _Group:
    gate: PageGate
    steps: StepLoop


@dataclass(slots=True)
class _Peers:
    session: PeerSession

    def usable_prefills(self) -> Iterable[PeerSession]:
        return [self.session]


class _NullWorker:
    """Encodes and decodes as the worker's client does, notes the times, ends after `passes`."""

    def __init__(self, passes: int) -> None:
        self.base = 0
        self.between_s: list[float] = []
        self.streams_s: list[float] = []
        self.enough = asyncio.Event()
        self._passes = passes
        self._answered: float | None = None
        self._decoder = msgspec.msgpack.Decoder(ToDaemon)

    async def step(self, step: Step) -> StepDone:
        msgspec.msgpack.encode(step)
        sent = time.perf_counter()
        if self._answered is not None:
            self.between_s.append(sent - self._answered)
        await asyncio.sleep(0)  # whoever waits for a token has it before this goes on
        self.streams_s.append(time.perf_counter() - sent)
        if len(self.between_s) >= self._passes:
            self.enough.set()
        drawn = [Drawn(part.sequence, 7, -0.5) for part in step.sequences if part.sampling]
        frame = msgspec.msgpack.encode(StepDone(step.pass_id, drawn, 0.0))
        self.base += LAYERS
        self._answered = time.perf_counter()
        answer = self._decoder.decode(frame)
        assert isinstance(answer, StepDone)
        return answer


def run(*, requests: int, passes: int) -> Report:
    """Some seconds of one core. `requests` at most 4095, the number of immediates."""
    decoding, tick_s = asyncio.run(_decode(requests, passes + _WARM_UP_PASSES))
    prefilling = asyncio.run(_prefill(requests, passes + _WARM_UP_PASSES))
    return Report(
        requests=requests,
        passes=passes,
        decode=_took(decoding.between_s[_WARM_UP_PASSES:]),
        prefill=_took(prefilling.between_s[_WARM_UP_PASSES:]),
        streams=_took(decoding.streams_s[_WARM_UP_PASSES:]),
        tick=_took(tick_s),
    )


def as_json(report: Report) -> str:
    return msgspec.json.encode(report).decode()


def as_table(report: Report) -> str:
    lines = [
        f"{report.requests} requests, {report.passes} passes",
        f"{'ms':<34}{'p50':>9}{'p99':>9}{'max':>9}",
    ]
    for name, took in (
        ("between two passes, decode", report.decode),
        ("between two passes, prefill", report.prefill),
        ("streams take their tokens", report.streams),
        ("messenger's tick", report.tick),
    ):
        lines.append(f"{name:<34}{took.p50:>9.3f}{took.p99:>9.3f}{took.max:>9.3f}")
    return "\n".join(lines)


async def _decode(requests: int, passes: int) -> tuple[_NullWorker, list[float]]:
    output = passes + 10
    geometry = _geometry(requests * (PROMPT_TOKENS + output + PAGE_TOKENS))
    gate, fabric = PageGate(PagePool(geometry.pages), geometry.pages), _fabric()
    outbox = _Outbox()
    session = _session(geometry, Role.PREFILL, outbox)
    pulls = PullMessenger(
        boot=_BOOT,
        geometry=geometry,
        fabric=fabric,
        gates=[gate],
        slots=SlotPool(),
        peer=PeerConfig(),
        drop_link=_drop_link,
        clock=time.monotonic,
    )
    service = NodeService(
        role=Role.DECODE,
        policy=WhenNoPrefill.REFUSE,
        model_name="null",
        context_tokens=CONTEXT_TOKENS,
        vocabulary=VOCABULARY,
        max_waiting=requests + 1,
        records=Records(),
        clock=time.monotonic,
    )
    worker = _NullWorker(passes)
    steps = StepLoop(_scheduler(requests), worker)
    service.start(groups=[_Group(gate, steps)], peers=_Peers(session), pulls=pulls)
    flights = [await service.submit(_request(number, output)) for number in range(requests)]
    while len(outbox.dispatches) < requests:
        await asyncio.sleep(0)
    for pull in list(pulls.open()):
        slot = pull.grant.slot
        pulls.fabric_event(cast(Event, _Reached(slot.slot, slot.generation)))
    while steps.scheduler.running < requests:
        await asyncio.sleep(0)
    streams = [asyncio.create_task(_read(flight)) for flight in flights]
    await _passes(steps.run, steps, worker)
    tick_s = [_timed(pulls.tick) for _ in range(passes)]
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return worker, tick_s


async def _prefill(requests: int, passes: int) -> _NullWorker:
    """Prompts are as many as `passes` need, `requests` of them at a time."""
    prompts = max(requests, 1 + passes * CHUNK_TOKENS // PROMPT_TOKENS)
    geometry = _geometry(prompts * (PROMPT_TOKENS + PAGE_TOKENS))
    worker = _NullWorker(passes)
    steps = StepLoop(_scheduler(requests), worker)
    session = _session(geometry, Role.DECODE, _Outbox())
    gate = PageGate(PagePool(geometry.pages), geometry.pages)
    pushes = PushMessenger(
        geometry=geometry,
        limits=DispatchLimits(VOCABULARY, CONTEXT_TOKENS, prompts),
        fabric=_fabric(),
        groups=[SourceGroup(gate, steps, (SourceRegion(0, 0),))],
        peer=PeerConfig(),
        drop_link=_drop_link,
        records=Records(),
        clock=time.monotonic,
    )
    pages = geometry.pages_for(PROMPT_TOKENS)
    waiting = iter(range(prompts))

    def dispatch() -> None:
        number = next(waiting, None)
        if number is not None:
            frame = wire.Dispatch(
                key=f"{_BOOT}:{number}",
                request_id=f"cmpl-{number}",
                tokens=[7] * PROMPT_TOKENS,
                pages=[wire.PageRun(number * pages, pages)],
                first_page=0,
                immediate=1 + number % 4095 << 20,
                context_slot=-1,
                deadline_s=PeerConfig().request_stall_s,
                priority=0,
            )
            pushes.session_frame(session, frame)

    async def feed() -> None:
        while not worker.enough.is_set():
            while steps.scheduler.waiting < requests and pushes.open_pushes < prompts:
                dispatch()
            await asyncio.sleep(0)

    feeding = asyncio.create_task(feed())
    await asyncio.sleep(0)
    await _passes(steps.run, steps, worker)
    await feeding
    return worker


async def _passes(
    loop: Callable[[], Awaitable[None]], steps: StepLoop, worker: _NullWorker
) -> None:
    calm_collector()

    async def ends() -> None:
        await worker.enough.wait()
        steps.stop()

    await asyncio.gather(loop(), ends())


async def _read(flight: Flight) -> None:
    async for _ in flight.events():
        pass


def _fabric() -> Fabric:
    return cast(Fabric, _NullFabric())


def _scheduler(requests: int) -> Scheduler:
    return Scheduler(page_tokens=PAGE_TOKENS, chunk_tokens=CHUNK_TOKENS, max_running=requests)


def _geometry(tokens: int) -> KvGeometry:
    """As of an 80-layer model with 8 KV heads; room for `tokens`."""
    return KvGeometry(
        kind="gqa",
        layers=LAYERS,
        kv_heads=8,
        head_dim=128,
        page_tokens=PAGE_TOKENS,
        dtype="bfloat16",
        tp=1,
        pages=-(-tokens // PAGE_TOKENS),
    )


def _session(geometry: KvGeometry, role: Role, outbox: _Outbox) -> PeerSession:
    fits = wire.Geometry(
        geometry.kind, LAYERS, 8, 128, PAGE_TOKENS, geometry.dtype, 1, geometry.pages
    )
    hello = wire.Hello(
        NodeId("peer"), _BOOT, role, 1, 1, "", "null", "", fits, CONTEXT_TOKENS, "tcp", ""
    )
    return PeerSession(
        session=SessionId(1),
        node=NodeId("peer"),
        boot=_BOOT,
        role=role,
        hello=hello,
        geometry=geometry,
        regions={0: 0},
        pairs=((0, 0),),
        outbox=outbox,
    )


def _request(number: int, output: int) -> Request:
    return Request(
        request_id=f"cmpl-{number}",
        prompt=(7,) * PROMPT_TOKENS,
        max_tokens=output,
        min_tokens=0,
        stop_tokens=frozenset(),
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        seed=number,
    )


def _drop_link(session: PeerSession, text: str) -> None:
    raise AssertionError(f"{session.node}: {text}")


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _took(seconds: list[float]) -> Took:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Took(*(round(1e3 * value, 4) for value in (cuts[49], cuts[98], max(seconds))))
