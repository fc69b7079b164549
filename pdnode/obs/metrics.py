"""Prometheus metrics: one table defines them all, and one object holds their values.

What the API counts (tokens, latencies, finished requests) is counted as it happens. All else
belongs to other parts and is read from them at scrape, as one `NodeFigures` record, so that
nothing is updated per page or per token for a scrape that may never come.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

MAX_LABEL_VALUES = 64
"""Values of one label that others choose (causes, reasons); the rest is added up as "other"."""

_MODEL_LABELS = ("model_name", "engine")
_ENGINE = "0"  # the label that vLLM gives its only engine

# vLLM's buckets, so that its dashboards work, plus what they lack: a 2 s edge for a 2 s target of
# the time to first token, edges below 10 ms between tokens, and below 0.3 s for whole requests.
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_BUCKETS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_E2E_BUCKETS = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class Metric(NamedTuple):
    """One row of the table. A counter's name ends in `_total`, which follows the unit."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str  # "" for plain counts
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def is_vllm(self) -> bool:
        """One of the names that vLLM's dashboards query; all can be switched off."""
        return self.name.startswith("vllm:")


TABLE: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "vllm:num_requests_running", "gauge", "", "Requests in the schedule.", _MODEL_LABELS
        ),
        Metric("vllm:num_requests_waiting", "gauge", "", "Requests that wait.", _MODEL_LABELS),
        Metric(
            "vllm:kv_cache_usage_perc", "gauge", "",
            "Share of the KV pages that are not free, 0 to 1.", _MODEL_LABELS,
        ),
        Metric(
            "vllm:prompt_tokens_total", "counter", "tokens",
            "Prompt tokens of admitted requests.", _MODEL_LABELS,
        ),
        Metric(
            "vllm:generation_tokens_total", "counter", "tokens", "Generated tokens.", _MODEL_LABELS
        ),
        Metric(
            "vllm:request_success_total", "counter", "",
            "Admitted requests that ended, by stop, length, abort (client gone) or error.",
            (*_MODEL_LABELS, "finished_reason"),
        ),
        Metric(
            "vllm:time_to_first_token_seconds", "histogram", "seconds",
            "From the request's head to its first token.", _MODEL_LABELS, _TTFT_BUCKETS,
        ),
        Metric(
            "vllm:inter_token_latency_seconds", "histogram", "seconds",
            "Between two tokens of one request.", _MODEL_LABELS, _ITL_BUCKETS,
        ),
        Metric(
            "vllm:e2e_request_latency_seconds", "histogram", "seconds",
            "From the request's head to its last token.", _MODEL_LABELS, _E2E_BUCKETS,
        ),
        Metric(
            "pdnode_kv_pages", "gauge", "",
            "KV pages by state: free, used, cached, reserved or quarantined.", ("state",),
        ),
        Metric(
            "pdnode_kv_transfer_bytes_total", "counter", "bytes",
            "KV bytes moved, by peer and direction (sent, received).", ("peer", "direction"),
        ),
        Metric("pdnode_kv_transfers_inflight", "gauge", "", "KV transfers that are not done."),
        Metric(
            "pdnode_kv_transfer_failures_total", "counter", "", "Failed KV transfers.", ("reason",)
        ),
        Metric("pdnode_fences_total", "counter", "", "Fences of peers and NICs.", ("cause",)),
        Metric(
            "pdnode_peer_up", "gauge", "", "1 while the session with a peer is up.",
            ("peer", "role"),
        ),
        Metric("pdnode_queue_depth", "gauge", "", "Entries of a bounded queue.", ("queue",)),
        Metric("pdnode_queue_limit", "gauge", "", "Most entries of a bounded queue.", ("queue",)),
        Metric(
            "pdnode_local_prefills_total", "counter", "",
            "Prompts that a decode node computed by itself.", ("reason",),
        ),
        Metric("pdnode_role_info", "gauge", "", "1 for the role of this node.", ("role",)),
        Metric("pdnode_build_info", "gauge", "", "1 for the version that runs.", ("version",)),
        Metric(
            "pdnode_http_unknown_fields_total", "counter", "",
            "Fields of request bodies that were ignored because nobody knows them.", ("route",),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """One configured or connected peer. Bytes count from the start of this process."""

    name: str
    role: str
    up: bool
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True, slots=True)
class QueueFigures:
    name: str
    depth: int
    limit: int


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
    transfer_failures: Mapping[str, int] = field(default_factory=dict)  # by reason
    fences: Mapping[str, int] = field(default_factory=dict)  # by cause
    local_prefills: Mapping[str, int] = field(default_factory=dict)  # by reason


class _NodeCollector(Collector):
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
        yield _gauge("pdnode_peer_up", {(peer.name, peer.role): peer.up for peer in node.peers})
        yield _gauge("pdnode_queue_depth", {(queue.name,): queue.depth for queue in node.queues})
        yield _gauge("pdnode_queue_limit", {(queue.name,): queue.limit for queue in node.queues})
        yield _counter("pdnode_local_prefills_total", _by_value(node.local_prefills))
        yield _gauge("pdnode_role_info", {(node.role,): 1})
        yield _gauge("pdnode_build_info", {(self._version,): 1})

    def _vllm(self, node: NodeFigures) -> Iterator[GaugeMetricFamily]:
        labels = (self._model, _ENGINE)
        pages = sum(node.pages.values())
        usage = 1 - node.pages.get("free", 0) / pages if pages else 0.0
        yield _gauge("vllm:num_requests_running", {labels: node.running})
        yield _gauge("vllm:num_requests_waiting", {labels: node.waiting})
        yield _gauge("vllm:kv_cache_usage_perc", {labels: usage})


class RequestMeter:
    """Measures one request. `admitted`, then `token` for each, then `ended` once."""

    def __init__(self, metrics: "Metrics", start_s: float) -> None:
        self._metrics = metrics
        self._start_s = start_s
        self._last_s: float | None = None
        self._admitted = False

    def admitted(self, prompt_tokens: int) -> None:
        self._admitted = True
        self._metrics.prompt_tokens.inc(prompt_tokens)

    def token(self) -> None:
        now = self._metrics.clock()
        if self._last_s is None:
            self._metrics.ttft.observe(now - self._start_s)
        else:
            self._metrics.itl.observe(now - self._last_s)
        self._last_s = now
        self._metrics.generation_tokens.inc()

    def ended(self, reason: str) -> None:
        """`reason`: stop, length, abort or error. Counts only what was admitted, and once."""
        if not self._admitted:
            return
        self._admitted = False
        self._metrics.finished(reason)
        if self._last_s is not None and reason in ("stop", "length"):
            self._metrics.e2e.observe(self._last_s - self._start_s)


class Metrics:
    """All metrics of one node, in a registry of its own. Used on the event loop only."""

    def __init__(
        self,
        figures: Callable[[], NodeFigures],
        *,
        model: str,
        version: str,
        vllm_names: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`figures` is called once per scrape; it must be quick and must not block."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series
        self.clock = clock
        self._registry = CollectorRegistry()
        self._vllm_registry = self._registry if vllm_names else None
        self._labels = {"model_name": model, "engine": _ENGINE}
        self.prompt_tokens = self._vllm_counter("vllm:prompt_tokens_total").labels(**self._labels)
        self.generation_tokens = self._vllm_counter("vllm:generation_tokens_total").labels(
            **self._labels
        )
        self._success = self._vllm_counter("vllm:request_success_total")
        self.ttft = self._vllm_histogram("vllm:time_to_first_token_seconds")
        self.itl = self._vllm_histogram("vllm:inter_token_latency_seconds")
        self.e2e = self._vllm_histogram("vllm:e2e_request_latency_seconds")
        unknown = TABLE["pdnode_http_unknown_fields_total"]
        self._unknown = Counter(unknown.name, unknown.help, unknown.labels, registry=self._registry)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**self._labels, finished_reason=reason)
        self._registry.register(
            _NodeCollector(figures, model=model, version=version, vllm_names=vllm_names)
        )

    def request(self, start_s: float | None = None) -> RequestMeter:
        """The meter of one generation. `start_s`: when its head had been read, on `clock`; None:
        just now."""
        return RequestMeter(self, self.clock() if start_s is None else start_s)

    def finished(self, reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def unknown_fields(self, route: str, count: int) -> None:
        if count:
            self._unknown.labels(route=route).inc(count)

    def render(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) of one scrape, in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _vllm_counter(self, name: str) -> Counter:
        metric = TABLE[name]
        return Counter(metric.name, metric.help, metric.labels, registry=self._vllm_registry)

    def _vllm_histogram(self, name: str) -> Histogram:
        metric = TABLE[name]
        histogram = Histogram(
            metric.name,
            metric.help,
            metric.labels,
            buckets=metric.buckets,
            registry=self._vllm_registry,
        )
        return histogram.labels(**self._labels)


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
