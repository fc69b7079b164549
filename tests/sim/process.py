"""One process of the cluster: the real parts on a loop, over a core and a worker of the simulator.

It joins them as daemon/node.py does. A restart is a new `Process` under the same node id.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pdnode.config import Config, ModelConfig, NodeConfig, PeerConfig, PrefillConfig
from pdnode.core import transfer, wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.heartbeat import Counters
from pdnode.core.hello import wire_geometry
from pdnode.core.link_effects import SessionLost
from pdnode.core.pages import PagePool
from pdnode.core.schedule import Scheduler
from pdnode.core.slots import Slot, SlotPool
from pdnode.core.transfer import FailCause
from pdnode.daemon.peering import Peering
from pdnode.daemon.service import NodeService
from pdnode.daemon.steps import StepLoop
from pdnode.messenger.devices import Devices
from pdnode.messenger.dispatch import DispatchLimits
from pdnode.messenger.gate import PageGate
from pdnode.messenger.groups import SourceGroup, SourceRegion
from pdnode.messenger.peer_link import Identity, PeerLink
from pdnode.messenger.peers import SESSION_EVENTS, PeerManager
from pdnode.messenger.pull import Pull, PullMessenger
from pdnode.messenger.push import PushMessenger, _turned
from pdnode.messenger.push_work import PushWork
from pdnode.messenger.session import PeerSession
from pdnode.obs.records import Records
from pdnode.types import BootId, Role, Run, TransferId, WhenNoPrefill, expand_runs
from tests.sim.agreement import check_reach
from tests.sim.fabric import Core
from tests.sim.kernel import NodeLoop, promise
from tests.sim.memory import Memory
from tests.sim.network import Socket
from tests.sim.wires import Event
from tests.sim.worker import VOCABULARY, Worker

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

CONTEXT_TOKENS = 32
CHUNK_TOKENS = 8
MAX_WAITING = 64
TICK_S = 0.25
MAX_QUARANTINED = 0.5
LONGEST_LAYER_S = 2.0  # a worker that hangs is for the watchdog
PEER = PeerConfig(
    token=b"the cluster's",
    heartbeat_s=0.4,
    link_lost_s=1.6,
    drained_timeout_s=2.0,
    request_stall_s=5.0,
    connect_timeout_s=1.5,
    reconnect_max_s=1.0,
    nic_retry_s=0.8,
    nic_retry_max_s=3.0,
)


@dataclass(frozen=True, slots=True)
class Spec:
    """What of a node survives its process."""

    name: str
    role: Role
    geometry: KvGeometry
    slots: int
    policy: WhenNoPrefill
    prefills: tuple[str, ...]  # whom a decode node dials
    groups: int = 1  # each of `geometry`
    reduces: bool = True  # a layer ends in an all-reduce over the ranks
    devices: Devices = field(kw_only=True)

    @property
    def nics(self) -> int:
        return sum(map(len, self.devices.nics))


class WatchedPool(PagePool):
    """Every page knows its owner's life; nothing comes back while anyone can touch it."""

    def __init__(self, pages: int, memory: Memory, worker: Worker) -> None:
        super().__init__(pages)
        self._memory = memory
        self._worker = worker

    def reserve(self, count: int) -> tuple[Run, ...]:
        runs = super().reserve(count)
        for page in expand_runs(runs):
            promise(not self._memory.owned[page], "a page has two owners")
            self._memory.owned[page] = True
            self._memory.life[page] += 1
        return runs

    def release(self, runs: tuple[Run, ...]) -> None:
        memory = self._memory
        for page in expand_runs(runs):
            promise(memory.owned[page], "a page was given back twice")
            promise(not memory.may_land[page], "a page was freed that a write may still land in")
            promise(not memory.being_read[page], "a page was freed that a write still reads")
            promise(page not in self._worker.computing, "a page was freed under a pass")
            memory.owned[page] = False
        super().release(runs)


class Group:
    """One TP group, as daemon.engine.Group: its memory, workers, pages and schedule."""

    def __init__(self, process: "Process", memory: Memory, first_rank: int) -> None:
        geometry = memory.geometry
        self.memory = memory
        self.worker = Worker(
            process.core, memory, first_rank=first_rank, reduces=process.spec.reduces,
            layer_s=process._layer_s, later=process.later,
        )  # fmt: skip
        self.pool = WatchedPool(geometry.pages, memory, self.worker)
        self.gate = PageGate(self.pool, int(MAX_QUARANTINED * geometry.pages))
        scheduler = Scheduler(
            page_tokens=geometry.page_tokens, chunk_tokens=CHUNK_TOKENS, max_running=4
        )
        self.steps = StepLoop(scheduler, self.worker)
        self.worker.steps = self.steps
        self.regions = tuple(
            SourceRegion(
                rank, first_rank if process.spec.reduces else rank, process.core.homes[rank]
            )
            for rank in range(first_rank, first_rank + geometry.tp)
        )


class WatchedSlots(SlotPool):
    """An immediate does not come back while a write that carries it may land."""

    def __init__(self, slots: int, may_land: Callable[[int], bool]) -> None:
        super().__init__(slots)
        self._may_land = may_land

    def give_back(self, slot: Slot) -> None:
        free = not self._may_land(slot.immediate)
        promise(free, "a slot came back that a write may still count on")
        super().give_back(slot)


class NotingPulls(PullMessenger):
    """Says which pages were granted under which key."""

    memories: Sequence[Memory]  # by group
    requests: dict[str, str]  # request key → request id
    strays: Callable[[], int]  # immediates that were sent twice on purpose
    at_edge: Callable[[str, str], None]  # an outcome is there, and nobody has heard of it yet
    moment: Callable[[Pull, list[transfer.Effect]], None]  # after every input of a grant

    def begin(self, session: PeerSession, *, pages: tuple[Run, ...], **rest: object) -> Pull:
        pull = super().begin(session, pages=pages, **rest)  # type: ignore[arg-type]
        self.requests[pull.grant.key] = str(rest["request_id"])
        memory = self.memories[pull.group]
        lives = memory.life
        granted = {page: lives[page] for page in expand_runs(pages)}
        memory.granted[pull.grant.key] = granted
        return pull

    def _apply(self, pull: Pull, effects: list[transfer.Effect]) -> None:
        super()._apply(pull, effects)
        self.moment(pull, effects)

    def _complete(self, pull: Pull) -> None:
        self.at_edge(self.requests[pull.grant.key], pull.grant.key)
        super()._complete(pull)

    def _lost(self, pull: Pull, lost: transfer.Lost) -> None:
        self.at_edge(self.requests[pull.grant.key], pull.grant.key)
        wrong = lost.cause in (FailCause.REJECTED, FailCause.UNKNOWN)
        promise(not wrong, f"a dispatch that was right came back as {lost.cause}: {lost.text}")
        over = lost.cause is FailCause.OVERSHOOT and not self.strays()
        promise(not over, "more was counted than was written")
        super()._lost(pull, lost)


class WatchedPushes(PushMessenger):
    """`moment` is called after every input of a push."""

    moment: Callable[[PushWork], None]

    def _apply(self, work: PushWork, effects: list[transfer.Effect]) -> None:
        super()._apply(work, effects)
        self.moment(work)

    def _carry_out(self, work: PushWork, effect: transfer.Effect) -> None:
        if isinstance(effect, transfer.Send) and isinstance(effect.frame, wire.Failed):
            failed = effect.frame
            left = {_turned(pair) for pair in work.session.pairs} - set(failed.pairs)
            lost = failed.cause != FailCause.WRITE or not left or not work.session.up
            promise(lost, f"an attempt was given up with connections left: {failed.text}")
        super()._carry_out(work, effect)


class CountingPeering(Peering):
    """Says that a NIC pair came back."""

    def __init__(self, messenger: PullMessenger | PushMessenger, process: "Process") -> None:
        super().__init__(messenger)
        self._process = process

    def pair_up(self, session: PeerSession, pair: tuple[int, int]) -> None:
        cluster = self._process.cluster
        cluster.returns += 1
        cluster.hunts.returned(self._process, pair[0])
        super().pair_up(session, pair)


class WatchedPeers(PeerManager):
    """No session ends for want of a NIC while it has any, unless memory cannot be registered."""

    def link_lost(self, link: PeerLink, lost: SessionLost) -> None:
        promise("registered with no other NIC" not in lost.cause, lost.cause)
        super().link_lost(link, lost)


class Process:
    """One life of a node, from its start to its crash."""

    def __init__(self, cluster: "Cluster", spec: Spec) -> None:
        kernel = cluster.kernel
        self.cluster = cluster
        self.spec = spec
        self.slow = 1.0
        self.started = False
        self.sockets: list[Socket] = []
        self._deferred: list[Callable[[], None]] = []
        offset_s = kernel.rng.uniform(0.0, 1000.0)
        self.loop = NodeLoop(kernel, offset_s=offset_s, lag=lambda: self.slow * cluster.lag())
        memories = [
            Memory(spec.geometry, writable=spec.role is Role.DECODE) for _ in range(spec.groups)
        ]
        self.core = Core(
            cluster.ether, spec.name, memories, spec.devices,
            later=self.later, emit=self._emit, key_of=self._key_of,
            lending=lambda group: cluster.hunts.lending(self, group),
            reopening=lambda session, nics: cluster.hunts.reopening(self, session, nics),
        )  # fmt: skip
        self.groups = [
            Group(self, memory, number * spec.geometry.tp) for number, memory in enumerate(memories)
        ]
        self.slots = WatchedSlots(spec.slots, self._slot_may_land)
        self.boot = BootId(kernel.rng.randbytes(16).hex())
        self.pulls: NotingPulls | None = None
        self.pushes: PushMessenger | None = None
        self.service = NodeService(
            role=spec.role,
            policy=spec.policy,
            model_name="m",
            context_tokens=CONTEXT_TOKENS,
            vocabulary=VOCABULARY,
            max_waiting=MAX_WAITING,
            records=Records(),
            clock=self.loop.time,
        )
        self.peers = self._make_peers()
        self.loop.call_soon(self._start)

    # building, as daemon/node.py

    def _make_peers(self) -> PeerManager:
        spec, kernel = self.spec, self.cluster.kernel
        messenger: PullMessenger | PushMessenger
        if spec.role is Role.PREFILL:
            messenger = self.pushes = self._make_push()
        else:
            messenger = self.pulls = self._make_pull()
        config = Config(
            node=NodeConfig(spec.name, spec.role, spec.policy),
            model=ModelConfig(Path("m"), "m"),
            peer=PEER,
            prefill=tuple(PrefillConfig(name, name, 7700) for name in spec.prefills),
        )
        hello = wire.Hello(
            node=spec.name, boot=self.boot, role=spec.role, protocol_min=1, protocol_max=1,
            pdnode_version="0", model="m", fingerprint="f",
            geometry=wire_geometry(spec.geometry, spec.groups),
            context_tokens=CONTEXT_TOKENS, provider="tcp", libfabric="2",
        )  # fmt: skip
        listens = spec.role is Role.PREFILL
        nics = tuple(
            wire.NicAddress(
                nic, f"nic{nic}", f"{spec.name}:{nic}".encode() if listens else b"",
                self.core.ranks_of(nic),
            )
            for nic in range(spec.nics)
        )  # fmt: skip
        regions = {} if listens else {rank: rank for rank in self.core.ranks}
        return WatchedPeers(
            config,
            Identity(hello, nics, regions, spec.devices, dict(enumerate(self.core.homes))),
            self.core,  # type: ignore[arg-type]
            CountingPeering(messenger, self),
            dial=self._dial,
            counters=self._counters,
            clock=self.loop.time,
            jitter=kernel.rng.random,
            entropy=kernel.rng.randbytes,
        )

    def _make_push(self) -> WatchedPushes:
        pushes = WatchedPushes(
            geometry=self.spec.geometry,
            limits=DispatchLimits(VOCABULARY, CONTEXT_TOKENS, MAX_WAITING),
            fabric=self.core,  # type: ignore[arg-type]
            groups=[SourceGroup(one.gate, one.steps, one.regions) for one in self.groups],
            peer=PEER,
            drop_link=self._drop_link,
            records=Records(),
            clock=self.loop.time,
            devices=self.spec.devices,
        )
        pushes.moment = lambda work: self.cluster.hunts.push(self, work)
        return pushes

    def _make_pull(self) -> NotingPulls:
        pulls = NotingPulls(
            boot=self.boot,
            geometry=self.spec.geometry,
            fabric=self.core,  # type: ignore[arg-type]
            gates=[one.gate for one in self.groups],
            slots=self.slots,
            peer=PEER,
            drop_link=self._drop_link,
            clock=self.loop.time,
        )
        pulls.memories = self.core.memories
        pulls.requests = {}
        pulls.at_edge = self.cluster.at_edge
        pulls.moment = lambda pull, effects: self.cluster.hunts.pull(self, pull, effects)
        pulls.strays = lambda: self.cluster.injected["stray immediate"]
        return pulls

    def _start(self) -> None:
        self.service.start(groups=self.groups, peers=self.peers, pulls=self.pulls)
        for work in (self._run_steps(), self._tick()):
            self.loop.create_task(work)
        self.peers.start()
        self.started = True

    async def _run_steps(self) -> None:
        running = [self.loop.create_task(one.steps.run()) for one in self.groups]
        for one, task in zip(self.groups, running, strict=True):
            one.worker.on_death = task.cancel
        done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if not self.dead:
            for task in done:
                task.result()
        for one in self.groups:  # from here on no pass touches any page
            if not one.worker.dead:
                one.worker.die()
        for task in left:
            task.cancel()
        text = "the worker died"
        self.service.engine_died(text, fatal=True)
        if self.pushes is not None:
            self.pushes.engine_failed(text)
        self.service.draining = True
        self.peers.drain(True)
        await self.peers.close()
        self.loop.call_soon(self.cluster.crash, self.spec.name)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.pulls is not None:
                self.pulls.tick()
                check_reach(self.cluster.processes, self)
            if self.pushes is not None:
                self.pushes.tick()

    def _counters(self) -> Counters:
        return Counters(
            steps=sum(one.steps.figures.steps for one in self.groups),
            step_busy=self.busy,
            core=sum(self.core.counters),
            waiting_tokens=sum(one.steps.waiting_tokens() for one in self.groups),
            free_pages=sum(one.pool.counts.free for one in self.groups),
        )

    def _drop_link(self, session: PeerSession, text: str) -> None:
        self.cluster.check_drop(text)
        self.peers.drop(session, text)

    def _dial(self, host: str, port: int) -> Awaitable[Socket]:
        return self.cluster.dial(self, host)

    # what the simulator does with it

    @property
    def alive(self) -> bool:
        return self.loop.alive

    @property
    def dead(self) -> bool:
        """A worker is, so that the node ends."""
        return any(one.worker.dead for one in self.groups)

    @property
    def busy(self) -> bool:
        return any(one.steps.busy for one in self.groups)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """For what is not the loop's: it waits while the process is frozen, and dies with it."""
        self.cluster.kernel.at(delay_s, self._do, act)

    def _do(self, act: Callable[[], None]) -> None:
        if not self.loop.alive:
            return
        if self.loop.frozen:
            self._deferred.append(act)
        else:
            act()

    def freeze(self) -> None:
        self.loop.freeze()
        self.core.frozen = True

    def thaw(self) -> None:
        self.core.frozen = False
        self.loop.thaw()
        deferred, self._deferred = self._deferred, []
        for act in deferred:
            self.later(0.0, act)

    def kill(self) -> None:
        self.loop.kill()
        self.core.alive = False

    def drain(self, wanted: bool) -> None:
        """As an operator would: no new work, what was accepted is finished."""
        assert self.pushes is not None
        self.pushes.draining = wanted
        self.peers.drain(wanted)

    def _key_of(self, transfer: int) -> str:
        assert self.pushes is not None
        return self.pushes._by_transfer[TransferId(transfer)].push.key

    def _layer_s(self) -> float:
        return min(LONGEST_LAYER_S, self.slow * self.cluster.layer_s())

    def _emit(self, event: Event) -> None:
        if event.kind in SESSION_EVENTS:
            self.loop.call_soon(self.peers.fabric_event, event)
        elif self.pushes is not None:
            self.loop.call_soon(self.pushes.fabric_event, event)
        elif self.pulls is not None:
            self.loop.call_soon(self.pulls.fabric_event, event)

    def _slot_may_land(self, immediate: int) -> bool:
        return any(
            write.immediate == immediate and not write.landed and not write.dropped
            for connection in self.cluster.ether.connections
            if connection.decode is self.core and connection.target_open
            for write in connection.writes
        )
