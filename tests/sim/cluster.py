"""A cluster for one seed: prefill and decode nodes, what is between them, clients and faults.

`run` raises whatever promise breaks first. All checks look from outside: at pages, writes, tokens
and outcomes, not at what the machines believe.
"""

import asyncio
import gc
import logging
import math
import random
from collections import Counter
from dataclasses import dataclass
from itertools import count

from pdnode.core.geometry import KvGeometry
from pdnode.core.grant import GrantState
from pdnode.core.request import Request
from pdnode.messenger import peers
from pdnode.messenger.devices import Devices
from pdnode.types import NodeId, Role, WhenNoPrefill
from tests.sim.agreement import disagreements
from tests.sim.clients import Client, prompt_of
from tests.sim.device_faults import CALM_DEVICE_FAULTS, DEVICE_FAULTS
from tests.sim.fabric import Core
from tests.sim.faults import CALM, FAULTS, Fault
from tests.sim.hunts import Hunts
from tests.sim.kernel import Failure, Kernel, promise
from tests.sim.network import Route, Socket, Stream
from tests.sim.process import PEER, Process, Spec
from tests.sim.wires import Ether, Write
from tests.sim.worker import VOCABULARY

PAGE_TOKENS = 4
LAYERS = 2
BEGIN_S = 1.0  # the links come up before
SPAN_S = 6.0  # in which requests and faults begin
HEAL_S = 120.0  # by then everything is back
LONGEST_LIFE_S = 60.0  # three attempts, each to its deadline, and the waits for pages
LEAVES_AT_EDGE = 0.01
CALM_RATIO = 0.3
MOST_EVENTS = 400_000
MIN_REQUESTS, MAX_REQUESTS = 30, 38
MIN_FAULTS, MAX_FAULTS = 5, 10
LONGEST_PROMPT, LONGEST_ANSWER = 21, 6
MOST_DEVICES = 3  # device groups of a node, in every second seed
MOST_NICS = 5  # of a node that has several
SHAPED_RATIO = 0.5  # of the clusters have one of SHAPES, and up to three groups a node
SHAPES = (  # kind, KV heads, ranks of a decode group, of a prefill group
    ("gqa", 4, 1, 2), ("gqa", 4, 4, 1), ("gqa", 4, 2, 4), ("gqa", 4, 2, 2), ("gqa", 6, 3, 2),
    ("gqa", 6, 2, 3), ("gqa", 2, 4, 4), ("gqa", 2, 1, 4), ("gqa", 1, 2, 3), ("gqa", 3, 3, 1),
    ("mla", 1, 1, 1), ("mla", 1, 2, 2), ("mla", 1, 1, 4), ("mla", 1, 3, 2), ("mla", 1, 4, 1),
)  # fmt: skip


def draw_devices(rng: random.Random, nics: int, most: int) -> Devices:
    """One to `most` device groups of at least one NIC each, and who is near to whom."""
    count = rng.randint(1, most)
    nics = max(nics, rng.randint(count, MOST_NICS) if count > 1 else 1)
    edges = [0, *sorted(rng.sample(range(1, nics), count - 1)), nics]
    members = tuple(frozenset(range(edges[n], edges[n + 1])) for n in range(count))
    near = tuple(
        (one, *rng.sample([other for other in range(count) if other != one], count - 1))
        for one in range(count)
    )
    return Devices(members, near)


@dataclass(frozen=True, slots=True)
class Result:
    outcomes: Counter[str]
    faults: Counter[str]
    requests: int
    returns: int  # NIC pairs that were lost and came back


class Cluster:
    """`faults`: whether there are any; without them every request has to be answered."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.kernel = Kernel(rng)
        self.injected: Counter[str] = Counter()
        self.returns = 0
        self.with_faults = faults
        self.grouped = seed % 2 == 0
        # In a calm cluster everything answers soon, so that no deadline may ever be needed.
        self.calm = rng.random() < CALM_RATIO
        slowest = -2.7 if self.calm else -1.2
        self._net_s = 10.0 ** rng.uniform(-3.7, slowest)
        self._fabric_s = 10.0 ** rng.uniform(-3.7, slowest)
        self._lag_s = 10.0 ** rng.uniform(-5.0, -3.0)
        self._pass_s = 10.0 ** rng.uniform(-3.0, -1.3)
        self.specs = self._draw_specs()
        self._links: dict[tuple[str, str], Route] = {}
        self._fabrics: dict[tuple[str, str], Route] = {}
        self.ether = Ether(
            self.kernel,
            {name: spec.nics for name, spec in self.specs.items()},
            route=self.fabric_route,
            find=self._find,
            delay=lambda: self._draw(self._fabric_s),
        )
        self.ether.check_land = self._check_land
        self.processes: dict[str, Process] = {}
        self.graves: list[Process] = []
        self.streams: list[Stream] = []
        self.clients: list[Client] = []
        self.to_come = rng.randint(MIN_REQUESTS, MAX_REQUESTS)
        self.to_fail = rng.randint(MIN_FAULTS, MAX_FAULTS) if faults else 0
        self.healed = False
        self.hunts = Hunts(self)

    def _draw_specs(self) -> dict[str, Spec]:
        rng = self.rng
        here, there = rng.choice(((1, 1), (1, 1), (1, 2), (2, 1), (2, 4)))
        heads = rng.choice((1, max(here, there)))  # 1: the ranks hold copies
        kind, groups, reduces = "gqa", (1, 1), True
        shapes = random.Random(f"shape of {self.seed}")  # of its own: seeds stay what they were
        devices = random.Random(f"device groups of {self.seed}")
        if shapes.random() < SHAPED_RATIO or self.grouped:
            kind, heads, here, there = shapes.choice(SHAPES)
            groups = (shapes.choice((1, 2, 3)), shapes.choice((1, 2, 3)))
            reduces = kind == "gqa" or shapes.random() < 0.5
        prefills = tuple(f"p{number}" for number in range(rng.choice((1, 2, 2))))
        specs = {}
        for name in (*prefills, *(f"d{number}" for number in range(rng.choice((1, 2, 2))))):
            decode = name.startswith("d")
            tp = here if decode else there
            geometry = KvGeometry(
                kind, LAYERS, heads, 8, PAGE_TOKENS, "float32", tp, rng.randint(8, 16)
            )
            nics, most = rng.choice((1, 2, 2, 3)), 1
            if self.grouped:
                most = min(MOST_DEVICES, tp * groups[not decode])
            specs[name] = Spec(
                name,
                Role.DECODE if decode else Role.PREFILL,
                geometry,
                devices=draw_devices(devices, nics, most),
                slots=rng.randint(2, 6),
                policy=rng.choice((WhenNoPrefill.LOCAL, WhenNoPrefill.REFUSE)),
                prefills=prefills if decode else (),
                groups=groups[not decode],
                reduces=reduces,
            )
        return specs

    # time

    def _draw(self, scale_s: float) -> float:
        """Mostly about `scale_s`, now and then a hundred times as long."""
        rng = self.rng
        drawn = scale_s * (0.2 - math.log(1.0 - rng.random()))
        return drawn * 30.0 if rng.random() < 0.01 else drawn

    def lag(self) -> float:
        return self._lag_s * self.rng.random()

    def layer_s(self) -> float:
        return self._draw(self._pass_s)

    # places

    def link_route(self, one: str, two: str) -> Route:
        return self._route(self._links, one, two, self._net_s)

    def fabric_route(self, one: str, two: str) -> Route:
        return self._route(self._fabrics, one, two, self._fabric_s)

    def _route(
        self, routes: dict[tuple[str, str], Route], one: str, two: str, scale_s: float
    ) -> Route:
        ends = min(one, two), max(one, two)
        if ends not in routes:
            routes[ends] = Route(self.kernel, lambda: self._draw(scale_s))
        return routes[ends]

    def _find(self, node: str) -> Core | None:
        process = self.processes.get(node)
        return process.core if process is not None and process.started else None

    async def dial(self, process: Process, host: str) -> Socket:
        """Opens a stream; a host that is partitioned away says nothing."""
        route = self.link_route(process.spec.name, host)
        await asyncio.sleep(2 * route.delay())
        if route.down:
            await asyncio.sleep(PEER.connect_timeout_s)
            raise OSError("timed out")
        target = self.processes.get(host)
        if target is None or not target.started:
            raise OSError("connection refused")
        here, there = Socket(process.loop, host), Socket(target.loop, process.spec.name)
        self.streams = [stream for stream in self.streams if not stream.broken]
        self.streams.append(Stream(route, here, there))
        process.sockets.append(here)
        target.sockets.append(there)
        target.loop.call_soon(
            lambda: target.loop.create_task(target.peers.accept(there))  # type: ignore[arg-type]
        )
        return here

    # lives

    def start(self, name: str) -> None:
        self.processes[name] = Process(self, self.specs[name])

    def crash(self, name: str, down_s: float | None = None) -> None:
        """SIGKILL. The node comes back, with the same address, after `down_s`."""
        process = self.processes.pop(name)
        self.graves.append(process)
        process.kill()
        for stream in self.streams:
            for end in stream.ends:
                if end in process.sockets:
                    stream.process_died(end)
        for connection in self.ether.connections:
            if connection.prefill is process.core and connection.sender_open:
                self.ether.abandon(connection)
                self.ether.told(connection, connection.decode)
            elif connection.decode is process.core and connection.target_open:
                connection.target_open = False
                self.ether.told(connection, connection.prefill)
        for client in self.clients:
            if client.process is process and client.outcome is None:
                client.end("crashed")
        self.kernel.at(self.rng.random() if down_s is None else down_s, self.start, name)

    # clients and faults

    def _arrive(self) -> None:
        up = [
            process
            for process in self.processes.values()
            if process.spec.role is Role.DECODE and process.started and not process.dead
        ]
        if not up:
            self.kernel.at(0.1, self._arrive)
            return
        self.to_come -= 1
        process = self.rng.choice(up)
        number = len(self.clients)
        prompt = prompt_of(number, self.rng.randint(1, LONGEST_PROMPT), VOCABULARY)
        answer = self.rng.randint(1, LONGEST_ANSWER)
        client = Client(
            Request(str(number), prompt, answer, 0, frozenset(), 0.0, 0, 1.0, 0), process
        )
        client.begun_at = self.kernel.now
        self.clients.append(client)
        process.loop.call_soon(lambda: process.loop.create_task(client.run()))

    def at_edge(self, request_id: str, key: str) -> None:
        """Now and then a client leaves between an outcome and the turn of who waits for it."""
        client = self.clients[int(request_id)]
        if self.hunts.leaves(key):
            client.leave()
        elif self.with_faults and not self.healed and self.rng.random() < LEAVES_AT_EDGE:
            if self.rng.random() < 0.5:
                client.leave()
            else:
                client.leaves = True
                client.process.loop.call_soon(client.leave)

    def _inject(self, fault: Fault, tries: int) -> None:
        """A fault waits for its moment; one that never comes is replaced."""
        if fault.act(self):
            self.injected[fault.name] += 1
            self.to_fail -= 1
        elif tries:
            self.kernel.at(0.03, self._inject, fault, tries - 1)
        else:
            self.kernel.at(0.03, self._inject, self.rng.choice(CALM), 20)

    def _schedule(self) -> None:
        rng = self.rng
        for _ in range(self.to_come):
            self.kernel.at(BEGIN_S + SPAN_S * rng.random(), self._arrive)
        kinds = rng.sample(CALM if self.calm else FAULTS, rng.randint(2, 6))
        if any(len(spec.devices.nics) > 1 for spec in self.specs.values()):
            kinds += CALM_DEVICE_FAULTS if self.calm else rng.sample(DEVICE_FAULTS, 3)
        for _ in range(self.to_fail):
            at_s = BEGIN_S + SPAN_S * rng.random()
            self.kernel.at(at_s, self._inject, rng.choice(kinds), 100)

    # the run

    def run(self) -> Result:
        peers._session_numbers = count(1)
        for name in self.specs:
            self.start(name)
        self._schedule()
        try:
            self.kernel.run(
                lambda: not (self.to_come or self.to_fail), until=60.0, most=MOST_EVENTS
            )
            if self.to_come or self.to_fail:
                raise Failure(f"{self.to_come} requests and {self.to_fail} faults never began")
            self.kernel.run(lambda: self._over(0), until=self.kernel.now + 1.0, most=MOST_EVENTS)
            self._heal()
            end = self.kernel.now + HEAL_S
            while not self._over(1) and self.kernel.now < end:
                step = self.kernel.now + 0.5
                self.kernel.run(lambda: False, until=step, most=MOST_EVENTS)
            self._check_end()
        finally:
            for process in (*self.graves, *self.processes.values()):
                process.loop.bury()
        outcomes = Counter(client.outcome or "" for client in self.clients)
        return Result(outcomes, self.injected, len(self.clients), self.returns)

    def _heal(self) -> None:
        self.healed = True
        for route in (*self._links.values(), *self._fabrics.values()):
            route.heal()
        self.ether.nic_late.clear()
        for node, nic in list(self.ether.nic_down):
            self.ether.nic_back(node, nic)
        for process in self.processes.values():
            process.slow = 1.0
            process.thaw()
            if process.pushes is not None and process.pushes.draining:
                process.loop.call_soon(process.drain, False)

    def _over(self, most: int) -> bool:
        """Every request has ended; `most`: and every node is there, idle and joined."""
        if any(client.outcome is None for client in self.clients):
            return False
        return not most or not self._unrest()

    def _unrest(self) -> list[str]:
        """What is not as it was at the beginning."""
        found = [f"{name} is down" for name in self.specs if name not in self.processes]
        for name, process in self.processes.items():
            spec, groups = process.spec, process.groups
            free = sum(one.pool.counts.free for one in groups)
            held = {
                "requests": process.service.open_requests,
                "pulls": process.pulls.open_pulls if process.pulls is not None else 0,
                "pushes": process.pushes.open_pushes if process.pushes is not None else 0,
                "pages held": spec.groups * spec.geometry.pages - free,
                "slots out": process.slots.taken,
                "slots armed": len(process.core.slots),
                "waits for pages": sum(one.gate.waiting for one in groups),
                "transfers": len(process.core.transfers),
                "sequences": sum(len(one.steps._entries) for one in groups),
            }
            found += [f"{name}: {number} {what}" for what, number in held.items() if number]
            usable = {session.node for session in process.peers.usable_prefills()}
            missing = {NodeId(peer) for peer in process.spec.prefills} - usable
            found += [f"{name}: no session with {peer}" for peer in missing]
            sessions = len(process.peers.sessions())
            if len(process.core.sessions) != sessions:
                found.append(f"{name}: {len(process.core.sessions)} sessions, {sessions} links")
            found += [f"{name}: {text}" for _, text in process.peers.warnings()]
        found += disagreements(self.processes)
        return found

    # promises

    def check_drop(self, text: str) -> None:
        """Deadlines are the last resort: in a calm cluster nobody owes an answer for so long."""
        if self.calm and text != "no connection is left":
            raise Failure(f"a link was dropped in a calm cluster: {text}")

    def _check_land(self, write: Write) -> None:
        core, key = write.connection.decode, write.transfer.key
        memory, _ = core.memory_of(write.target_rank)
        promise(key in memory.granted, "a write landed in another group than the request's")
        granted = memory.granted[key]
        over = core.registered(write.connection.decode_session, write.connection.pair[0])
        reached = over.get(write.target_rank) == write.key
        promise(reached, "a write landed over a NIC that its memory is not registered with")
        for _, page in write.pages:
            mine = memory.owned[page] and granted.get(page) == memory.life[page]
            promise(mine, "a write landed in a page of another request")
        process = self.processes[core.node]
        assert process.pulls is not None
        pull = next((p for k, p in process.pulls._pulls.items() if k == key), None)
        done = pull is None or pull.grant.state is GrantState.COMPLETE
        promise(not done, "a write landed after its pages were complete")

    def _check_end(self) -> None:
        open_ones = [client.request.request_id for client in self.clients if client.outcome is None]
        if open_ones:
            raise Failure(f"requests that never ended: {open_ones}")
        unrest = self._unrest()
        if unrest:
            raise Failure("; ".join(unrest))
        for client in self.clients:
            self._check_outcome(client)

    def _check_outcome(self, client: Client) -> None:
        """Whether this request may have ended like that, and so late."""
        assert client.outcome is not None
        lived_s = client.ended_at - client.begun_at
        promise(lived_s <= LONGEST_LIFE_S, f"a request took {lived_s:.0f} s to end")
        if client.outcome in ("length", "crashed") or (client.outcome == "cancelled"
                                                       and client.leaves):  # fmt: skip
            return
        process = client.process
        if process.dead and client.outcome in ("internal_error", "unavailable"):
            return
        if self.injected["stray immediate"] and client.outcome == "prefill_lost":
            return
        remote = process.spec.policy is WhenNoPrefill.REFUSE and self.with_faults
        allowed = remote and client.outcome in ("unavailable", "prefill_lost", "stalled")
        promise(allowed, f"a request ended as {client.outcome}")
        promise(not client.got, "a stream that was decoding was harmed")


def run(seed: int, *, faults: bool = True) -> Result:
    """One seed, from start to rest. The collector would only disturb."""
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        return Cluster(seed, faults=faults).run()
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
