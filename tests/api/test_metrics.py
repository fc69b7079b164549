"""Metrics: every row of the table moves, and is documented."""

import re
from pathlib import Path

import msgspec
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from pdnode.core.request import TokenEvent
from pdnode.errors import PrefillLost
from pdnode.obs.metrics import Metrics
from pdnode.obs.metrics_table import TABLE
from pdnode.obs.node_figures import (
    MAX_LABEL_VALUES,
    NicFigures,
    NodeFigures,
    PeerFigures,
    QueueFigures,
)
from pdnode.obs.records import LayerTimes, RequestRecord, TransferRecord
from tests.support.fake_service import serve, tokens

FIGURES = NodeFigures(
    role="decode",
    running=3,
    waiting=2,
    pages={"free": 70, "used": 20, "cached": 0, "reserved": 9, "quarantined": 1},
    transfers_inflight=4,
    peers=(
        PeerFigures("pf-1", "prefill", up=True, rtt_s=0.004, bytes_received=1 << 40),
        PeerFigures("pf-2", "prefill", up=False),
    ),
    queues=(QueueFigures("waiting", depth=2, limit=256), QueueFigures("kv-drain", 3, None)),
    nics=(
        NicFigures(
            "mlx5_0",
            10,
            20,
            writes_failed=1,
            line_bytes_per_s=5e10,
            wire={"sent": 15, "received": 16},
            wire_errors={"drops": 17},
        ),
        NicFigures("mlx5_1"),
    ),
    transfer_failures={"peer_lost": 5},
    fences={"link_lost": 6},
    local_prefills={"no_prefill": 7},
    recomputed=8,
    rejected=9,
    immediates={"late": 10, "early": 11, "overshoot": 12},
    steps=13,
    warnings={("W202", "warning"): 2},
    log_lines_held=14,
)
MODEL = {"model_name": "tiny", "engine": "0"}
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, frozenset(labels.items())]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_figures_of_the_node_are_read_at_scrape() -> None:
    async with serve(figures=FIGURES) as bench:
        status, headers, text = await bench.get("/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert value(text, "vllm:num_requests_running", **MODEL) == 3
    assert value(text, "vllm:num_requests_waiting", **MODEL) == 2
    assert round(value(text, "vllm:kv_cache_usage_perc", **MODEL), 6) == 0.3
    assert value(text, "pdnode_kv_pages", state="reserved") == 9
    assert value(text, "pdnode_kv_pages", state="quarantined") == 1
    assert value(text, "pdnode_kv_pages", state="cached") == 0
    received = {"peer": "pf-1", "direction": "received"}
    assert value(text, "pdnode_kv_transfer_bytes_total", **received) == 1 << 40
    assert value(text, "pdnode_kv_transfers_inflight") == 4
    assert value(text, "pdnode_kv_transfer_failures_total", reason="peer_lost") == 5
    assert value(text, "pdnode_fences_total", cause="link_lost") == 6
    assert value(text, "pdnode_peer_up", peer="pf-1", role="prefill") == 1
    assert value(text, "pdnode_peer_up", peer="pf-2", role="prefill") == 0
    assert value(text, "pdnode_queue_depth", queue="waiting") == 2
    assert value(text, "pdnode_queue_limit", queue="waiting") == 256
    assert value(text, "pdnode_local_prefills_total", reason="no_prefill") == 7
    assert ("pdnode_queue_limit", frozenset({("queue", "kv-drain")})) not in samples(text)
    assert value(text, "pdnode_queue_depth", queue="kv-drain") == 3
    assert value(text, "pdnode_peer_rtt_seconds", peer="pf-1") == 0.004
    assert ("pdnode_peer_rtt_seconds", frozenset({("peer", "pf-2")})) not in samples(text)
    assert value(text, "pdnode_nic_bytes_total", nic="mlx5_0", direction="sent") == 10
    assert value(text, "pdnode_nic_bytes_total", nic="mlx5_0", direction="received") == 20
    assert value(text, "pdnode_nic_errors_total", nic="mlx5_0", kind="write") == 1
    assert value(text, "pdnode_nic_wire_bytes_total", nic="mlx5_0", direction="sent") == 15
    assert value(text, "pdnode_nic_wire_bytes_total", nic="mlx5_0", direction="received") == 16
    assert value(text, "pdnode_nic_wire_errors_total", nic="mlx5_0", kind="drops") == 17
    speeds = [labels for name, labels in samples(text) if "link_speed" in name]
    assert speeds == [frozenset({("nic", "mlx5_0")})]  # not known is not 0
    assert value(text, "pdnode_nic_link_speed_bytes_per_second", nic="mlx5_0") == 5e10
    assert value(text, "pdnode_recomputed_total") == 8
    assert value(text, "pdnode_requests_rejected_total") == 9
    assert value(text, "pdnode_kv_immediates_total", kind="late") == 10
    assert value(text, "pdnode_kv_immediates_total", kind="early") == 11
    assert value(text, "pdnode_kv_immediates_total", kind="overshoot") == 12
    assert value(text, "pdnode_steps_total") == 13
    assert value(text, "pdnode_warning", code="W202", severity="warning") == 2
    assert value(text, "pdnode_telemetry_dropped_total", kind="log") == 14
    assert value(text, "pdnode_role_info", role="decode") == 1
    assert value(text, "pdnode_build_info", version="0.0") == 1


async def test_requests_are_counted_by_how_they_end() -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 9}
    async with serve() as bench:
        await bench.post("/v1/completions", body)  # "hi": length
        bench.service.script = tokens("hi", "stop")
        await bench.post("/v1/completions", body)
        bench.service.script = tokens("stop here")
        await bench.post("/v1/completions", {**body, "stop": "p"})
        bench.service.script = [TokenEvent(65, 0.0, None), PrefillLost("gone")]
        await bench.post("/v1/completions", body)
        await bench.post("/v1/completions", {**body, "n": 9})  # refused: counts nowhere
        text = bench.metrics.render("")[0].decode()
    ended = {
        reason: value(text, "vllm:request_success_total", finished_reason=reason, **MODEL)
        for reason in ("stop", "length", "abort", "error")
    }
    assert ended == {"stop": 2, "length": 1, "abort": 0, "error": 1}
    assert value(text, "vllm:prompt_tokens_total", **MODEL) == 4 * 5
    assert value(text, "vllm:generation_tokens_total", **MODEL) == 2 + 2 + 4 + 1
    assert value(text, "vllm:time_to_first_token_seconds_count", **MODEL) == 4
    assert value(text, "vllm:inter_token_latency_seconds_count", **MODEL) == 1 + 1 + 3
    assert value(text, "vllm:e2e_request_latency_seconds_count", **MODEL) == 3


def test_latencies_are_measured_from_the_head_of_the_request() -> None:
    clock = Clock()
    metrics = Metrics(lambda: FIGURES, model="tiny", version="0", clock=clock)
    clock.now = 100.0
    meter = metrics.request()
    clock.now = 101.9
    meter.admitted(10)
    meter.token()
    for now in (101.904, 101.912):
        clock.now = now
        meter.token()
    meter.ended("length")
    meter.ended("error")  # counts once
    text = metrics.render("")[0].decode()
    assert value(text, "vllm:time_to_first_token_seconds_bucket", le="1.0", **MODEL) == 0
    assert value(text, "vllm:time_to_first_token_seconds_bucket", le="2.0", **MODEL) == 1
    assert value(text, "vllm:inter_token_latency_seconds_bucket", le="0.005", **MODEL) == 1
    assert value(text, "vllm:inter_token_latency_seconds_bucket", le="0.01", **MODEL) == 2
    assert round(value(text, "vllm:e2e_request_latency_seconds_sum", **MODEL), 6) == 1.912
    done = "vllm:request_success_total"
    assert value(text, done, finished_reason="length", **MODEL) == 1
    assert value(text, done, finished_reason="error", **MODEL) == 0


RECORD = RequestRecord(
    request_id="r", prefill="pf-1", finish="length", prompt_tokens=700, output_tokens=11,
    admit_s=0.01, prefill_queue_s=0.02, prefill_s=0.3, transfer_wait_s=0.004, first_step_s=0.05,
    ttft_s=0.384, decode_s=1.0, total_s=1.384,
)  # fmt: skip


def total(text: str, name: str, **labels: str) -> tuple[float, float]:
    """(count, sum) of a histogram."""
    found = value(text, f"{name}_sum", **labels)
    return value(text, f"{name}_count", **labels), round(found, 9)


def test_phases_of_a_request_sum_to_its_time_to_first_token() -> None:
    clock = Clock()
    metrics = Metrics(lambda: FIGURES, model="tiny", version="0", clock=clock)
    meter = metrics.request()
    clock.now = 0.006
    meter.submitted()
    meter.admitted(700)
    clock.now = 0.39
    meter.token()
    metrics.request_done(RECORD)
    text = metrics.render("")[0].decode()
    parts = {
        phase: total(text, "pdnode_request_phase_seconds", phase=phase)
        for phase in ("accept", "admit", "prefill_queue", "prefill", "transfer_wait", "first_step")
    }
    assert parts == {
        "accept": (1, 0.006),
        "admit": (1, 0.01),
        "prefill_queue": (1, 0.02),
        "prefill": (1, 0.3),
        "transfer_wait": (1, 0.004),
        "first_step": (1, 0.05),
    }
    ttft_s = total(text, "vllm:time_to_first_token_seconds", **MODEL)[1]
    assert round(sum(seconds for _, seconds in parts.values()), 9) == ttft_s


def test_finished_requests_fill_the_histograms_of_vllm() -> None:
    metrics = Metrics(lambda: FIGURES, model="tiny", version="0")
    metrics.request_done(RECORD)
    metrics.request_done(structs.replace(RECORD, finish="abort"))  # has phases, no more
    metrics.request_done(structs.replace(RECORD, finish="stalled", output_tokens=0))
    text = metrics.render("")[0].decode()
    assert total(text, "vllm:request_queue_time_seconds", **MODEL) == (1, 0.03)
    assert total(text, "vllm:request_prefill_time_seconds", **MODEL) == (1, 0.354)
    assert total(text, "vllm:request_decode_time_seconds", **MODEL) == (1, 1.0)
    assert total(text, "vllm:request_inference_time_seconds", **MODEL) == (1, 1.354)
    assert total(text, "vllm:request_time_per_output_token_seconds", **MODEL) == (1, 0.1)
    assert total(text, "vllm:request_prompt_tokens", **MODEL) == (1, 700)
    assert total(text, "vllm:request_generation_tokens", **MODEL) == (1, 11)
    assert total(text, "pdnode_request_phase_seconds", phase="prefill") == (2, 0.6)


def test_transfers_are_timed_from_first_write_to_last_completion() -> None:
    metrics = Metrics(lambda: FIGURES, model="tiny", version="0")
    rows = (
        LayerTimes(0, 0, 1_000_000, 1_003_000, 5_000_000, 10, 1),
        LayerTimes(0, 1, 2_000_000, 2_001_000, 9_003_000, 10, 1),
        LayerTimes(0, 2, 0, 0, 0, 0, 0),  # never posted
    )
    record = TransferRecord("k", "r", "dc", "drained", 10, 1, 20, 2, 0.0, 0.1, 0.2, rows)
    metrics.transfer_done(record)
    metrics.transfer_done(structs.replace(record, layers=(), outcome="cancelled"))
    text = metrics.render("")[0].decode()
    assert total(text, "pdnode_kv_transfer_duration_seconds") == (1, 0.008)
    assert total(text, "pdnode_kv_transfer_post_seconds") == (2, 0.000004)


def test_label_values_from_outside_are_bounded() -> None:
    many = {f"cause-{number}": 1 for number in range(MAX_LABEL_VALUES + 40)}
    figures = NodeFigures(role="decode", fences=many)
    text = Metrics(lambda: figures, model="m", version="0").render("")[0].decode()
    fences = {key: got for key, got in samples(text).items() if key[0] == "pdnode_fences_total"}
    assert len(fences) == MAX_LABEL_VALUES + 1
    assert sum(fences.values()) == len(many)
    assert value(text, "pdnode_fences_total", cause="other") == 40


def test_vllm_names_can_be_switched_off() -> None:
    metrics = Metrics(lambda: FIGURES, model="tiny", version="0", vllm_names=False)
    metrics.request().admitted(5)
    text = metrics.render("")[0].decode()
    assert "vllm:" not in text
    assert "pdnode_kv_pages" in text


def test_what_is_exported_is_the_table() -> None:
    metrics = Metrics(lambda: FIGURES, model="tiny", version="0")
    metrics.unknown_fields("chat", 2)
    families = {
        family.name: family
        for family in text_string_to_metric_families(metrics.render("")[0].decode())
    }
    assert families.keys() == {name.removesuffix("_total") for name in TABLE}
    for name, metric in TABLE.items():
        family = families[name.removesuffix("_total")]
        assert family.type == metric.kind
        assert name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        if metric.unit:
            assert name.removesuffix("_total").endswith(f"_{metric.unit}")
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels)


def test_openmetrics_is_served_when_asked_for() -> None:
    metrics = Metrics(lambda: FIGURES, model="tiny", version="0")
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_the_documentation_has_every_metric() -> None:
    rows = [
        f"| `{metric.name}` | {metric.kind} | {metric.unit or '-'} "
        f"| {', '.join(metric.labels) or '-'} | {metric.help} |"
        for metric in TABLE.values()
    ]
    documented = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert documented == rows


def test_the_dashboard_queries_only_metrics_that_exist() -> None:
    dashboard = msgspec.json.decode((DOCS.parent / "grafana.json").read_bytes())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["query"]["query"] for one in dashboard["templating"]["list"][1:]]
    queried = set()
    for query in queries:
        found = re.findall(r"\b(?:vllm:|pdnode_)[a-z0-9_]+", query)
        assert found, query
        queried |= set(found)
    exported = {
        name + end
        for name, metric in TABLE.items()
        for end in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
    }
    assert queried <= exported
    for query in queries:  # every label that is asked for is one of the metric's
        for name, wanted in re.findall(r"\b((?:vllm:|pdnode_)[a-z0-9_]+)\{([^}]*)\}", query):
            labels = {one.partition("=")[0].strip("!~ ") for one in wanted.split(",")}
            metric = TABLE.get(name) or TABLE[re.sub(r"_(bucket|sum|count)$", "", name)]
            assert labels <= {"instance", *metric.labels}
