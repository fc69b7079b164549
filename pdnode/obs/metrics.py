"""Prometheus metrics: one table defines them all, and one object holds their values.

What the API and the messenger finish (tokens, latencies, requests, transfers) is counted as it
happens. All else belongs to other parts and is read from them at scrape, as one `NodeFigures`
record, so that nothing is updated per page or per token for a scrape that may never come.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from pdnode.obs.metrics_table import ENGINE, PHASES, TABLE
from pdnode.obs.node_figures import NodeCollector, NodeFigures
from pdnode.obs.records import RequestRecord, TransferRecord, wire_s
from pdnode.obs.windows import WindowQuantiles

_FINISHED = ("stop", "length")


class RequestMeter:
    """Measures one request. `admitted`, then `token` for each, then `ended` once."""

    def __init__(self, metrics: "Metrics", start_s: float) -> None:
        self._metrics = metrics
        self._start_s = start_s
        self._accept_s = 0.0
        self._last_s: float | None = None
        self._admitted = False

    def submitted(self) -> None:
        """Read, checked and tokenized: the service has it next, and measures the other phases."""
        self._accept_s = self._metrics.clock() - self._start_s

    def admitted(self, prompt_tokens: int) -> None:
        self._admitted = True
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.tokens_in += prompt_tokens

    def token(self) -> None:
        metrics = self._metrics
        now = metrics.clock()
        if self._last_s is None:
            metrics.ttft.observe(now - self._start_s)
            metrics.phases["accept"].observe(self._accept_s)
        else:
            metrics.itl.observe(now - self._last_s)
            metrics.itl_window.add(now - self._last_s, now=now)
        self._last_s = now
        metrics.generation_tokens.inc()
        metrics.tokens_out += 1

    def ended(self, reason: str) -> None:
        """`reason`: stop, length, abort or error. Counts only what was admitted, and once."""
        if not self._admitted:
            return
        self._admitted = False
        self._metrics.finished(reason)
        if self._last_s is not None and reason in _FINISHED:
            self._metrics.e2e.observe(self._last_s - self._start_s)


class Metrics:
    """All metrics of one node, in a registry of its own. Used on the event loop only.

    `tokens_in`, `tokens_out` and `itl_window` are for the snapshot.
    """

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
        self.tokens_in = 0
        self.tokens_out = 0
        self.itl_window = WindowQuantiles()
        self._registry = CollectorRegistry()
        self._vllm_registry = self._registry if vllm_names else None
        self._labels = {"model_name": model, "engine": ENGINE}
        self.prompt_tokens = self._counter("vllm:prompt_tokens_total").labels(**self._labels)
        self.generation_tokens = self._counter("vllm:generation_tokens_total").labels(
            **self._labels
        )
        self._success = self._counter("vllm:request_success_total")
        self.ttft = self._vllm_histogram("vllm:time_to_first_token_seconds")
        self.itl = self._vllm_histogram("vllm:inter_token_latency_seconds")
        self.e2e = self._vllm_histogram("vllm:e2e_request_latency_seconds")
        self._tpot = self._vllm_histogram("vllm:request_time_per_output_token_seconds")
        self._queue = self._vllm_histogram("vllm:request_queue_time_seconds")
        self._prefill = self._vllm_histogram("vllm:request_prefill_time_seconds")
        self._decode = self._vllm_histogram("vllm:request_decode_time_seconds")
        self._inference = self._vllm_histogram("vllm:request_inference_time_seconds")
        self._prompt_sizes = self._vllm_histogram("vllm:request_prompt_tokens")
        self._output_sizes = self._vllm_histogram("vllm:request_generation_tokens")
        phases = self._histogram("pdnode_request_phase_seconds")
        self.phases = {phase: phases.labels(phase=phase) for phase in PHASES}
        self._transfers = self._histogram("pdnode_kv_transfer_duration_seconds")
        self._posts = self._histogram("pdnode_kv_transfer_post_seconds")
        self._unknown = self._counter("pdnode_http_unknown_fields_total")
        for reason in (*_FINISHED, "abort", "error"):
            self._success.labels(**self._labels, finished_reason=reason)
        self._registry.register(
            NodeCollector(figures, model=model, version=version, vllm_names=vllm_names)
        )

    def request(self, start_s: float | None = None) -> RequestMeter:
        """The meter of one generation. `start_s`: when its head had been read, on `clock`; None:
        just now."""
        return RequestMeter(self, self.clock() if start_s is None else start_s)

    def finished(self, reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def request_done(self, record: RequestRecord) -> None:
        """A request of this node ended. Without a first token it has no phases."""
        if not record.output_tokens:
            return
        for phase in PHASES[1:]:
            self.phases[phase].observe(getattr(record, f"{phase}_s"))
        if record.finish not in _FINISHED:
            return
        queue_s = record.admit_s + record.prefill_queue_s
        self._queue.observe(queue_s)
        self._prefill.observe(record.ttft_s - queue_s)
        self._decode.observe(record.decode_s)
        self._inference.observe(record.total_s - queue_s)
        self._prompt_sizes.observe(record.prompt_tokens)
        self._output_sizes.observe(record.output_tokens)
        if record.output_tokens > 1:
            self._tpot.observe(record.decode_s / (record.output_tokens - 1))

    def transfer_done(self, record: TransferRecord) -> None:
        """A transfer of this prefill node ended; what was never posted has no times."""
        if (duration_s := wire_s(record)) is not None:
            self._transfers.observe(duration_s)
        for row in record.layers:
            if 0 < row.raised_ns <= row.posted_ns:
                self._posts.observe(1e-9 * (row.posted_ns - row.raised_ns))

    def unknown_fields(self, route: str, count: int) -> None:
        if count:
            self._unknown.labels(route=route).inc(count)

    def render(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) of one scrape, in the format that `accept` asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _home(self, name: str) -> CollectorRegistry | None:
        return self._vllm_registry if TABLE[name].is_vllm else self._registry

    def _counter(self, name: str) -> Counter:
        metric = TABLE[name]
        return Counter(metric.name, metric.help, metric.labels, registry=self._home(name))

    def _histogram(self, name: str) -> Histogram:
        metric = TABLE[name]
        return Histogram(
            metric.name,
            metric.help,
            metric.labels,
            buckets=metric.buckets,
            registry=self._home(name),
        )

    def _vllm_histogram(self, name: str) -> Histogram:
        return self._histogram(name).labels(**self._labels)
