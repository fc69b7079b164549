"""A decode node's daemon side under load, without model, NIC or socket: real service, messenger,
pages and schedule over a fabric that only answers; for the snapshot's size and cost.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pdnode.config import ApiConfig, Config, ModelConfig, NicConfig, NodeConfig, PeerConfig
from pdnode.configfile import Loaded
from pdnode.core.geometry import KvGeometry
from pdnode.core.pages import PagePool
from pdnode.core.request import Request
from pdnode.core.schedule import Scheduler
from pdnode.core.slots import SlotPool
from pdnode.core.wire import Geometry as WireGeometry
from pdnode.core.wire import Hello, NicAddress
from pdnode.daemon.control import Control
from pdnode.daemon.engine import Engine, Group
from pdnode.daemon.observe import Observation
from pdnode.daemon.reload import ConfigSource
from pdnode.daemon.service import NodeService
from pdnode.daemon.steps import StepLoop
from pdnode.daemon.transfer import Transfer
from pdnode.messenger.devices import ONE_GROUP
from pdnode.messenger.gate import PageGate
from pdnode.messenger.peer_records import PeerStatus
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.session import PeerSession
from pdnode.obs.records import Records
from pdnode.types import BootId, NodeId, Role, SessionId, WhenNoPrefill
from tests.support.messenger_parts import FabricEvent, Outbox, RecordingFabric

LAYERS = 80
GEOMETRY = KvGeometry("gqa", LAYERS, 8, 128, 64, "bfloat16", 1, 65536)
PROMPT = tuple(range(2048))
NICS, PEERS = 8, 16


class BusyFabric(RecordingFabric):
    """Half of everything has landed."""

    library_version = "2.5"

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0  # every one moves 50 GB over each NIC

    def counted(self, slot: int) -> int:
        return 32 * LAYERS // 2

    def statistics(self) -> dict[str, int]:
        return {"turns": 1, "late_immediates": 0, "early_immediates": 0, "overshoots": 0}

    def nic_statistics(self) -> list[dict[str, int | str]]:
        return [
            {
                "nic": number,
                "name": f"mlx5_{number}",
                "done_bytes": 0,
                "received_units": self.seconds * (100_000 + number),
                "failed_writes": 0,
            }
            for number in range(NICS)
        ]

    def peer_statistics(self) -> list[dict[str, int]]:
        return [
            {
                "session": 1 + peer,
                "local_nic": nic,
                "done_bytes": 0,
                "received_units": self.seconds * 10_000,
            }
            for peer in range(PEERS)
            for nic in range(NICS)
        ]


@dataclass
class BusyPeers:
    """The peer manager, as service and snapshot ask it."""

    ends: list[PeerSession] = field(default_factory=list)

    def usable_prefills(self) -> Iterable[PeerSession]:
        return self.ends

    def sessions(self) -> list[PeerSession]:
        return self.ends

    def status(self) -> list[PeerStatus]:
        return [
            PeerStatus(end.node, end.node, "prefill", "up", "", 0.0004, 9e4, 0.2)
            for end in self.ends
        ]

    def warnings(self) -> list[tuple[str, str]]:
        return [("W203", f"{self.ends[0].node}: the step loop does not move")]

    def drain(self, wanted: bool) -> None:
        pass


@dataclass
class BusyNode:
    observation: Observation
    control: Control
    service: NodeService
    pulls: PullMessenger
    fabric: BusyFabric

    async def take(self, requests: int) -> None:
        """Admit so many; a quarter of them gets its pages, and the writers' word."""
        flights = [
            await self.service.submit(
                Request(
                    f"cmpl-0123456789abcdef0123456789ab-{number:08x}",
                    PROMPT,
                    512,
                    0,
                    frozenset(),
                    0.0,
                    0,
                    1.0,
                    number,
                )
            )
            for number in range(requests)
        ]
        await _turns(lambda: self.pulls.open_pulls == requests)
        for pull in list(self.pulls.open())[: requests // 4]:
            slot = pull.grant.slot
            self.pulls.fabric_event(FabricEvent("reached", slot.slot, slot.generation))
        await _turns(lambda: sum(flight.pull is not None for flight in flights) == requests // 4)


async def _turns(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0)


def _session(number: int) -> PeerSession:
    name = NodeId(f"prefill-{number:02}")
    geometry = WireGeometry("gqa", LAYERS, 8, 128, 64, "bfloat16", 1, 65536)
    hello = Hello(
        name, "b" * 32, "prefill", 1, 1, "0.1.0", "m", "f" * 64, geometry, 1 << 17, "verbs", "2.5"
    )
    return PeerSession(
        session=SessionId(1 + number),
        node=name,
        boot=BootId("b" * 32),
        role=Role.PREFILL,
        hello=hello,
        geometry=GEOMETRY,
        regions={},
        pairs=tuple((nic, nic) for nic in range(NICS)),
        outbox=_Void(),
    )


class _Void(Outbox):
    def put(self, frame: object) -> None:
        pass


def busy_node() -> BusyNode:
    """Call inside a running event loop."""
    nics = tuple(NicConfig(f"mlx5_{n}", f"192.0.2.{n}", "", "") for n in range(NICS))
    config = Config(
        node=NodeConfig("decode-1", Role.DECODE, WhenNoPrefill.REFUSE),
        model=ModelConfig(cast(Any, "/models/m"), "llama-3.3-70b"),
        api=ApiConfig(),
    )
    config = replace(
        config,
        fabric=replace(config.fabric, provider="verbs", nics=nics),
        engine=replace(config.engine, max_waiting=1024),
    )
    records = Records()
    service = NodeService(
        role=Role.DECODE,
        policy=WhenNoPrefill.REFUSE,
        model_name="llama-3.3-70b",
        context_tokens=1 << 17,
        vocabulary=1 << 17,
        max_waiting=1024,
        records=records,
        clock=time.monotonic,
    )
    observation = Observation(config, service, records, boot=BootId("a" * 32))
    control = observation.control(
        ConfigSource(cast(Any, None), Loaded(config, ())), cast(Any, None), cast(Any, None)
    )
    fabric, gate = BusyFabric(), PageGate(PagePool(GEOMETRY.pages), 1024)
    pulls = PullMessenger(
        boot=BootId("a" * 32),
        geometry=GEOMETRY,
        fabric=cast(Any, fabric),
        gates=[gate],
        slots=SlotPool(),
        peer=PeerConfig(),
        drop_link=lambda end, text: None,
        clock=time.monotonic,
    )
    scheduler = Scheduler(page_tokens=64, chunk_tokens=512, max_running=64)
    steps = StepLoop(scheduler, cast(Any, None))
    peers = BusyPeers([_session(number) for number in range(PEERS)])
    parts = observation.parts
    parts.engine = Engine(GEOMETRY, (Group(cast(Any, None), gate, steps),))
    addresses = tuple(NicAddress(n, f"mlx5_{n}", b"") for n in range(NICS))
    speeds = {f"mlx5_{n}": 50e9 for n in range(NICS)}
    parts.transfer = Transfer(
        cast(Any, None), cast(Any, fabric), ONE_GROUP, (0,), addresses, speeds
    )
    parts.peers, parts.pull = cast(Any, peers), pulls
    service.start(groups=parts.engine.groups, peers=peers, pulls=pulls)
    return BusyNode(observation, control, service, pulls, fabric)
