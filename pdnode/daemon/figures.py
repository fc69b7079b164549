"""What a scrape shows of this node, gathered from the parts that own the numbers."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pdnode.config import Config, PeerConfig
from pdnode.core.geometry import KvGeometry
from pdnode.core.grant import GrantState
from pdnode.core.plan import routes
from pdnode.core.slots import MAX_SLOTS
from pdnode.daemon.engine import Engine
from pdnode.daemon.fabrictest import FabricTest
from pdnode.daemon.hostview import ERROR_KINDS, HostView, NicReading
from pdnode.daemon.kvregion import staged_bytes, staged_conditions
from pdnode.daemon.peering import Peering
from pdnode.daemon.service import NodeService
from pdnode.daemon.transfer import Transfer
from pdnode.messenger.digests import PageVerifier
from pdnode.messenger.peers import PeerManager
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.obs.log import lines_held
from pdnode.obs.node_figures import NicFigures, NodeFigures, PeerFigures, QueueFigures
from pdnode.obs.warnings import Condition, Warnings
from pdnode.types import BootId, RegionKind, SessionId

_ODD = {"late": "late_immediates", "early": "early_immediates", "overshoot": "overshoots"}


def mean_unit_bytes(source: KvGeometry, destination: KvGeometry) -> float:
    """Bytes of a page unit: of one page of one layer over one route, on average over the routes."""
    page_bytes = destination.tp * destination.page_bytes
    return page_bytes / len(routes(source, destination))


@dataclass(slots=True)
class Figures:
    """The node's parts, set as they come up; `read` works from the start."""

    config: Config
    service: NodeService
    warnings: Warnings
    boot: BootId
    engine: Engine | None = None
    transfer: Transfer | None = None
    peers: PeerManager | None = None
    pull: PullMessenger | None = None
    push: PushMessenger | None = None
    peering: Peering | None = None
    verifier: PageVerifier | None = None  # of a decode node
    reload_links: Callable[[PeerConfig], None] | None = None  # new certificates for new links
    fabric_test: FabricTest | None = None
    host: HostView | None = None
    readings: Mapping[str, NicReading] = field(default_factory=dict)  # of the last second
    _unit_bytes: float = 0.0  # of what NICs receive; kept while no peer is there

    def read(self) -> NodeFigures:
        push, pull, engine = self.push, self.pull, self.engine
        failures: dict[str, int] = {}
        if push is not None:
            failures = dict(push.figures.failures)
        if pull is not None:
            failures = dict(pull.figures.failures)
        verified = None if self.verifier is None else self.verifier.figures
        odd = {} if self.transfer is None else self.transfer.fabric.statistics()
        shown: Counter[tuple[str, ...]] = Counter(
            (one.code, one.severity) for one in self.warnings.current()
        )
        return NodeFigures(
            role=self.config.node.role,
            running=self.service.running,
            waiting=self.service.waiting,
            pages={} if engine is None else engine.page_counts._asdict(),
            transfers_inflight=self.open_transfers,
            peers=tuple(self._peers()),
            queues=tuple(self.read_queues()),
            nics=tuple(self.nics()),
            transfer_failures=failures,
            fences={} if self.peering is None else self.peering.fences,
            nic_returns=0 if self.peering is None else self.peering.returns,
            detours=self._detours(),
            local_prefills=self.service.local_prefills,
            recomputed=self.service.recomputed,
            rejected=self.service.rejected,
            immediates={kind: odd[name] for kind, name in _ODD.items() if name in odd},
            steps=0 if engine is None else engine.figures.steps,
            warnings=shown,
            log_lines_held=lines_held(),
            pages_verified={} if verified is None else verified.pages,
            mismatches={} if verified is None else verified.mismatches,
            staged_bytes=self.staged(),
        )

    def staged(self) -> dict[str, int]:
        """Bytes that were copied between the GPUs and their mirrors, by direction."""
        engine = self.engine
        if engine is None or engine.region.kind is not RegionKind.STAGED:
            return {}
        figures = engine.figures
        pages = {"fetched": figures.fetched_pages, "stored": figures.stored_pages}
        return {way: staged_bytes(count, engine.geometry) for way, count in pages.items()}

    def conditions(self) -> Iterable[Condition]:
        engine = self.engine
        if engine is None:
            return ()
        pages = engine.figures.fetched_pages + engine.figures.stored_pages
        return staged_conditions(engine.region, self.config.node.role, engine.geometry, pages)

    def _detours(self) -> int:
        pushed = 0 if self.push is None else self.push.figures.detours
        return pushed + (0 if self.peers is None else self.peers.carried)

    @property
    def open_transfers(self) -> int:
        """Transfers of which something may still land, here or at a peer."""
        pulls = 0 if self.pull is None else sum(not pull.over for pull in self.pull.open())
        return pulls + (0 if self.push is None else self.push.open_pushes)

    @property
    def used_ratio(self) -> float:
        """Share of the KV pages that are not free."""
        counts = () if self.engine is None else self.engine.page_counts
        return 1 - counts[0] / sum(counts) if counts else 0.0

    def moved_by_peer(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(bytes received, sent) of the sessions that are up, by NIC name and peer's node id."""
        if self.transfer is None or self.engine is None or self.peers is None:
            return {}
        sessions = {session.session: session for session in self.peers.sessions()}
        names = {nic.nic: nic.name for nic in self.transfer.nics}
        moved: dict[tuple[str, str], tuple[int, int]] = {}
        for row in self.transfer.fabric.peer_statistics():
            session = sessions.get(SessionId(row["session"]))
            if session is None:
                continue
            key = (names[row["local_nic"]], session.node)
            received, sent = moved.get(key, (0, 0))
            unit_bytes = mean_unit_bytes(session.geometry, self.engine.geometry)
            moved[key] = (
                received + round(row["received_units"] * unit_bytes),
                sent + row["done_bytes"],
            )
        return moved

    def nics(self) -> list[NicFigures]:
        if self.transfer is None or self.engine is None:
            return []
        for session in () if self.peers is None else self.peers.sessions():
            # Prefill nodes are alike, or else this is right for the one that came up last only.
            self._unit_bytes = mean_unit_bytes(session.geometry, self.engine.geometry)
        return [
            NicFigures(
                name=str(row["name"]),
                bytes_sent=int(row["done_bytes"]),
                bytes_received=round(int(row["received_units"]) * self._unit_bytes),
                writes_failed=int(row["failed_writes"]),
                line_bytes_per_s=self.transfer.line_bytes_per_s.get(str(row["name"])),
                wire=self._wire(str(row["name"])),
                wire_errors=self._wire_errors(str(row["name"])),
            )
            for row in self.transfer.fabric.nic_statistics()
        ]

    def _wire(self, nic: str) -> dict[str, int]:
        """What the kernel counted on a NIC, by direction; empty where it does not count."""
        if (reading := self.readings.get(nic)) is None:
            return {}
        traffic = reading.traffic
        both = {"sent": traffic.sent_bytes, "received": traffic.received_bytes}
        return {way: count for way, count in both.items() if count is not None}

    def _wire_errors(self, nic: str) -> dict[str, int]:
        if (reading := self.readings.get(nic)) is None:
            return {}
        found = {kind: getattr(reading.traffic, kind) for kind in ERROR_KINDS}
        return {kind: count for kind, count in found.items() if count is not None}

    def _peers(self) -> list[PeerFigures]:
        if self.peers is None:
            return []
        sent = {} if self.push is None else self.push.figures.bytes
        received = {} if self.pull is None else self.pull.figures.bytes
        return [
            PeerFigures(
                name=peer.node or peer.name,
                role=peer.role,
                up=(up := peer.state in ("up", "drain")),
                rtt_s=peer.rtt_s if up and peer.rtt_s else None,
                bytes_sent=sent.get(peer.node, 0),
                bytes_received=received.get(peer.node, 0),
            )
            for peer in self.peers.status()
        ]

    def read_queues(self) -> list[QueueFigures]:
        limit = self.config.engine.max_waiting
        if self.push is not None:
            return [QueueFigures("prefill", self.push.open_pushes, limit)]
        running = self.config.engine.max_running
        found = [
            QueueFigures("waiting", self.service.waiting, limit),
            QueueFigures("running", self.service.running, running),
        ]
        if self.pull is not None:
            pulls = [pull for pull in self.pull.open() if not pull.over]
            waits = sum(pull.grant.state is GrantState.DISPATCHED for pull in pulls)
            found.append(QueueFigures("kv-wait", waits, MAX_SLOTS))
            found.append(QueueFigures("kv-drain", len(pulls) - waits, None))
        return found
