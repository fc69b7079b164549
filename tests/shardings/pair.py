"""A prefill and a decode node of any sharding: real messengers, step loops and compiled cores on
loopback, around a null model. Only the peer link is short: frames are encoded, decoded and handed
over. The two cores live as long as the module's tests, the rest as long as one shape.
"""

import asyncio
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.pages import PagePool
from pdnode.core.schedule import Scheduler
from pdnode.core.slots import SlotPool
from pdnode.daemon.steps import StepLoop
from pdnode.fabric._native import Event, Fabric
from pdnode.fabric.library import find_library
from pdnode.messenger.dispatch import DispatchLimits
from pdnode.messenger.gate import PageGate
from pdnode.messenger.groups import SourceGroup
from pdnode.messenger.pull import Pull, PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.messenger.session import PeerSession
from pdnode.obs.records import Records
from pdnode.types import BootId, NodeId, Role, Run, SessionId
from tests.shardings.pattern import CANARY, PAGE_TOKENS, UNWRITTEN, Group, NullModel

TOKEN = b"0123456789abcdef"
CHUNK_TOKENS = 9 * PAGE_TOKENS
VOCABULARY = 1000
WAIT_S = 30.0
PAIR = (0, 0)


class Cores:
    """The two compiled cores, joined anew for each shape."""

    def __init__(self) -> None:
        library = str(find_library("auto", "tcp"))
        self.sender, self.target = (Fabric(library, "tcp", "adaptive") for _ in range(2))
        for fabric in (self.sender, self.target):
            fabric.add_group([("lo", "127.0.0.1")])
        self.port = self.sender.listen(0, "127.0.0.1", 0)
        self.slots = SlotPool()
        self.sessions = 0
        self.transfers = 0

    @property
    def segments(self) -> int:
        """Pieces that one operation gathers."""
        limits = self.sender.limits
        return min(int(limits["iov_limit"]), int(limits["rma_iov_limit"]))

    def close(self) -> None:
        self.sender.close()
        self.target.close()


@dataclass(slots=True)
class Wire:
    """One direction of the peer link."""

    deliver: Callable[[wire.Frame], None]

    def put(self, frame: wire.Frame) -> None:
        decoded = wire.decode(wire.encode(frame))
        asyncio.get_running_loop().call_soon(self.deliver, decoded)


@dataclass(slots=True, eq=False)
class Pair:
    """`prefill` and `decode`: geometry of each group, and how many groups. Call inside a loop."""

    cores: Cores
    prefill: KvGeometry
    prefill_groups: int
    decode: KvGeometry
    decode_groups: int
    reduces: bool
    sources: list[Group] = field(init=False)
    targets: list[Group] = field(init=False)
    models: list[NullModel] = field(init=False)
    pools: list[PagePool] = field(init=False)  # of the decode node
    source_pools: list[PagePool] = field(init=False)
    push: PushMessenger = field(init=False)
    pulls: PullMessenger = field(init=False)
    _events: list[Event] = field(init=False, default_factory=list)
    _sessions: dict[Role, PeerSession] = field(init=False, default_factory=dict)
    _loops: list[StepLoop] = field(init=False)

    def __post_init__(self) -> None:
        cores, here, there = self.cores, self.prefill, self.decode
        self.sources = [
            Group(cores.sender, here, number * here.tp, UNWRITTEN)
            for number in range(self.prefill_groups)
        ]
        self.targets = [
            Group(cores.target, there, number * there.tp, CANARY)
            for number in range(self.decode_groups)
        ]
        self.models = [NullModel(group, reduces=self.reduces) for group in self.sources]
        self.source_pools = [PagePool(here.pages) for _ in self.sources]
        self.pools = [PagePool(there.pages) for _ in self.targets]
        self._loops = [
            StepLoop(
                Scheduler(page_tokens=PAGE_TOKENS, chunk_tokens=CHUNK_TOKENS, max_running=1), model
            )
            for model in self.models
        ]
        cores.sessions += 1
        self._join()
        self.push = PushMessenger(
            geometry=here,
            limits=DispatchLimits(VOCABULARY, here.pages * PAGE_TOKENS, 64),
            fabric=cores.sender,
            groups=[
                SourceGroup(PageGate(pool, here.pages), loop, model.regions())
                for pool, loop, model in zip(
                    self.source_pools, self._loops, self.models, strict=True
                )
            ],
            peer=PeerConfig(),
            drop_link=_no_drop,
            records=Records(),
            clock=asyncio.get_running_loop().time,
        )
        self.push._transfers = cores.transfers  # numbers of the core's life, not of a shape's
        self.pulls = PullMessenger(
            boot=BootId("decode"),
            geometry=there,
            fabric=cores.target,
            gates=[PageGate(pool, there.pages) for pool in self.pools],
            slots=cores.slots,
            peer=PeerConfig(),
            drop_link=_no_drop,
            clock=asyncio.get_running_loop().time,
        )

    async def run(self, prompts: list[tuple[int, tuple[Run, ...], tuple[int, ...]]]) -> None:
        """(decode group, pages, prompt) of requests that are all sent at once; until drained."""
        loop = asyncio.get_running_loop()
        for fabric, handler in (
            (self.cores.sender, self.push.fabric_event),
            (self.cores.target, self.pulls.fabric_event),
        ):
            loop.add_reader(fabric.event_fd, _hand_over, fabric, handler)
        steps = [asyncio.create_task(one.run()) for one in self._loops]
        try:
            async with asyncio.timeout(WAIT_S):
                await self._requests(prompts)
        finally:
            for one in self._loops:
                one.stop()
            await asyncio.gather(*steps)
            for fabric in (self.cores.sender, self.cores.target):
                loop.remove_reader(fabric.event_fd)
            self.cores.transfers = self.push._transfers

    async def _requests(self, prompts: list[tuple[int, tuple[Run, ...], tuple[int, ...]]]) -> None:
        pulls: list[Pull] = []
        for group, pages, prompt in prompts:
            slot = self.cores.slots.take()
            assert slot is not None
            pulls.append(
                self.pulls.begin(
                    self._sessions[Role.PREFILL],
                    request_id="r",
                    prompt=prompt,
                    pages=pages,
                    slot=slot,
                    priority=0,
                    group=group,
                )
            )
        for pull in pulls:
            outcome = await pull.outcome
            assert outcome.complete, outcome
            self.pulls.end(pull)
        while self.pulls.open_pulls or self.push.open_pushes:
            await asyncio.sleep(0.001)

    def close(self) -> None:
        """Fences, so that the regions can go."""
        session = self.cores.sessions
        for fabric in (self.cores.target, self.cores.sender):
            fabric.fence(session)
            self._wait(fabric, "fenced")
        for model in self.models:
            model.close()
        for group in (*self.sources, *self.targets):
            group.close()

    def _join(self) -> None:
        """A session that is up on both sides."""
        sender, target, session = self.cores.sender, self.cores.target, self.cores.sessions
        writable = {
            region: group.first_rank + rank
            for group in self.targets
            for rank, region in enumerate(group.regions)
        }
        sender.open_session(session, [0], [], TOKEN)
        target.open_session(session, [0], list(writable), TOKEN)
        self._wait(sender, "opened")
        self._wait(target, "opened")
        target.connect(session, PAIR, f"127.0.0.1:{self.cores.port}".encode(), WAIT_S)
        for fabric, other in ((sender, target), (target, sender)):
            self._wait(fabric, "connected")
            described = [
                (writable.get(region, -1), pieces) for region, pieces in other.descriptors(session)
            ]
            fabric.set_remote(session, described)
        for fabric in (sender, target):
            fabric.probe(session)
        for fabric in (sender, target):
            self._wait(fabric, "probed")
        self._sessions = {
            Role.PREFILL: self._session(Role.PREFILL, lambda frame: self._to_prefill(frame)),
            Role.DECODE: self._session(Role.DECODE, lambda frame: self._to_decode(frame)),
        }

    def _session(self, peer: Role, deliver: Callable[[wire.Frame], None]) -> PeerSession:
        prefill = peer is Role.PREFILL
        return PeerSession(
            session=SessionId(self.cores.sessions),
            node=NodeId(peer),
            boot=BootId(peer),
            role=peer,
            hello=None,  # type: ignore[arg-type]  # the messengers do not look at it
            geometry=self.prefill if prefill else self.decode,
            regions={},
            pairs=(PAIR,),
            groups=self.prefill_groups if prefill else self.decode_groups,
            outbox=Wire(deliver),
        )

    def _to_prefill(self, frame: wire.Frame) -> None:
        self.push.session_frame(self._sessions[Role.DECODE], frame)

    def _to_decode(self, frame: wire.Frame) -> None:
        self.pulls.session_frame(self._sessions[Role.PREFILL], frame)

    def _wait(self, fabric: Fabric, kind: str) -> None:
        """Until `fabric` has said `kind` of this session; the rest of what it says is dropped."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            select.select([fabric.event_fd], [], [], 0.1)
            said = [(event.kind, event.session) for event in fabric.take_events()]
            if (kind, self.cores.sessions) in said:
                return
        raise AssertionError(f"not {kind} within {WAIT_S:g} s")


def _hand_over(fabric: Fabric, handler: Callable[[Event], None]) -> None:
    for event in fabric.take_events():
        if event.kind in ("reached", "overshoot", "drained", "failed", "settled"):
            handler(event)


def _no_drop(session: PeerSession, text: str) -> None:
    raise AssertionError(f"the link to {session.node} was dropped: {text}")
