"""What a scrape reads of the node: the figures, and how they become samples."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pdnode.obs.metrics_table import ENGINE, TABLE

MAX_LABEL_VALUES = 64
"""Values of one label that others choose (causes, reasons); the rest is added up as "other"."""


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """One configured or connected peer. Bytes count from the start of this process."""

    name: str
    role: str
    up: bool
    rtt_s: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True, slots=True)
class QueueFigures:
    name: str
    depth: int
    limit: int | None  # None: bounded by something else


@dataclass(frozen=True, slots=True)
class NicFigures:
    """One NIC. Counts are from the start of this process; the link speed is of one direction."""

    name: str
    bytes_sent: int = 0
    bytes_received: int = 0
    writes_failed: int = 0
    line_bytes_per_s: float | None = None
    # As the kernel counts: bytes by direction, trouble by kind. What it does not, is not there.
    wire: Mapping[str, int] = field(default_factory=dict)
    wire_errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What a scrape shows of the node; totals count from the start of this process."""

    role: str
    running: int = 0
    waiting: int = 0
    pages: Mapping[str, int] = field(default_factory=dict)  # by state, "free" among them
    transfers_inflight: int = 0
    peers: tuple[PeerFigures, ...] = ()
    queues: tuple[QueueFigures, ...] = ()
    nics: tuple[NicFigures, ...] = ()
    transfer_failures: Mapping[str, int] = field(default_factory=dict)  # by reason
    fences: Mapping[str, int] = field(default_factory=dict)  # by cause
    nic_returns: int = 0
    detours: int = 0
    local_prefills: Mapping[str, int] = field(default_factory=dict)  # by reason
    recomputed: int = 0
    rejected: int = 0
    immediates: Mapping[str, int] = field(default_factory=dict)  # late, early, overshoot
    steps: int = 0
    warnings: Mapping[tuple[str, ...], int] = field(default_factory=dict)  # by code, severity
    log_lines_held: int = 0
    pages_verified: Mapping[str, int] = field(default_factory=dict)  # by when
    mismatches: Mapping[str, int] = field(default_factory=dict)  # by when
    staged_bytes: Mapping[str, int] = field(default_factory=dict)  # by direction


class NodeCollector(Collector):
    """Reads the node's figures at scrape."""

    def __init__(
        self, figures: Callable[[], NodeFigures], *, model: str, version: str, vllm_names: bool
    ) -> None:
        self._figures = figures
        self._model = model
        self._version = version
        self._vllm_names = vllm_names

    def describe(self) -> list[GaugeMetricFamily]:
        """Empty: registering must not ask for figures that are not there yet."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        node = self._figures()
        if self._vllm_names:
            yield from self._vllm(node)
        yield _gauge("pdnode_kv_pages", _by_value(node.pages))
        yield _counter("pdnode_kv_transfer_bytes_total", _peer_bytes(node.peers))
        yield _gauge("pdnode_kv_transfers_inflight", {(): node.transfers_inflight})
        yield _counter("pdnode_kv_transfer_failures_total", _by_value(node.transfer_failures))
        yield _counter("pdnode_fences_total", _by_value(node.fences))
        yield _counter("pdnode_nic_returns_total", {(): node.nic_returns})
        yield _counter("pdnode_detours_total", {(): node.detours})
        yield _gauge("pdnode_peer_up", {(peer.name, peer.role): peer.up for peer in node.peers})
        yield _gauge(
            "pdnode_peer_rtt_seconds",
            {(peer.name,): peer.rtt_s for peer in node.peers if peer.rtt_s is not None},
        )
        yield from _nics(node.nics)
        yield _counter("pdnode_recomputed_total", {(): node.recomputed})
        yield _counter("pdnode_requests_rejected_total", {(): node.rejected})
        yield _counter("pdnode_kv_immediates_total", _by_value(node.immediates))
        yield _counter("pdnode_kv_pages_verified_total", _by_value(node.pages_verified))
        yield _counter("pdnode_kv_mismatches_total", _by_value(node.mismatches))
        yield _counter("pdnode_kv_staged_bytes_total", _by_value(node.staged_bytes))
        yield _counter("pdnode_steps_total", {(): node.steps})
        yield _gauge("pdnode_warning", node.warnings)
        yield _counter("pdnode_telemetry_dropped_total", {("log",): node.log_lines_held})
        yield _gauge("pdnode_queue_depth", {(queue.name,): queue.depth for queue in node.queues})
        limits: Samples = {(q.name,): float(q.limit) for q in node.queues if q.limit is not None}
        yield _gauge("pdnode_queue_limit", limits)
        yield _counter("pdnode_local_prefills_total", _by_value(node.local_prefills))
        yield _gauge("pdnode_role_info", {(node.role,): 1})
        yield _gauge("pdnode_build_info", {(self._version,): 1})

    def _vllm(self, node: NodeFigures) -> Iterator[GaugeMetricFamily]:
        labels = (self._model, ENGINE)
        pages = sum(node.pages.values())
        usage = 1 - node.pages.get("free", 0) / pages if pages else 0.0
        yield _gauge("vllm:num_requests_running", {labels: node.running})
        yield _gauge("vllm:num_requests_waiting", {labels: node.waiting})
        yield _gauge("vllm:kv_cache_usage_perc", {labels: usage})


Samples = Mapping[tuple[str, ...], float]


def _gauge(name: str, samples: Samples) -> GaugeMetricFamily:
    metric = TABLE[name]
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples.items():
        family.add_metric(labels, float(value))
    return family


def _counter(name: str, samples: Samples) -> CounterMetricFamily:
    metric = TABLE[name]
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples.items():
        family.add_metric(labels, float(value))
    return family


def _by_value(counts: Mapping[str, int]) -> Samples:
    """One sample per label value; those beyond MAX_LABEL_VALUES are added up as "other"."""
    samples: dict[tuple[str, ...], float] = {}
    for value, count in counts.items():
        label = (value,) if len(samples) < MAX_LABEL_VALUES else ("other",)
        samples[label] = samples.get(label, 0) + count
    return samples


def _peer_bytes(peers: tuple[PeerFigures, ...]) -> Samples:
    samples: dict[tuple[str, ...], float] = {}
    for peer in peers:
        samples[(peer.name, "sent")] = peer.bytes_sent
        samples[(peer.name, "received")] = peer.bytes_received
    return samples


def _nics(nics: tuple[NicFigures, ...]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    moved: dict[tuple[str, ...], float] = {}
    for nic in nics:
        moved[(nic.name, "sent")] = nic.bytes_sent
        moved[(nic.name, "received")] = nic.bytes_received
    yield _counter("pdnode_nic_bytes_total", moved)
    wire: Samples = {(nic.name, way): count for nic in nics for way, count in nic.wire.items()}
    yield _counter("pdnode_nic_wire_bytes_total", wire)
    errors: Samples = {
        (nic.name, kind): count for nic in nics for kind, count in nic.wire_errors.items()
    }
    yield _counter("pdnode_nic_wire_errors_total", errors)
    yield _counter("pdnode_nic_errors_total", {(n.name, "write"): n.writes_failed for n in nics})
    speeds: Samples = {
        (n.name,): n.line_bytes_per_s for n in nics if n.line_bytes_per_s is not None
    }
    yield _gauge("pdnode_nic_link_speed_bytes_per_second", speeds)
