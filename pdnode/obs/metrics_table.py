"""The table of all metrics: name, type, unit, help, labels, buckets. docs/metrics.md repeats it."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

_MODEL_LABELS = ("model_name", "engine")
ENGINE = "0"  # the label that vLLM gives its only engine

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


_PHASE_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5,
    5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TPOT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_TOKEN_BUCKETS = tuple(
    float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)
)  # fmt: skip
_TRANSFER_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
_POST_BUCKETS = (
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2, 0.1, 1.0,
)  # fmt: skip
PHASES = ("accept", "admit", "prefill_queue", "prefill", "transfer_wait", "first_step")


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
            "vllm:request_time_per_output_token_seconds", "histogram", "seconds",
            "Mean time between the tokens of one request.", _MODEL_LABELS, _TPOT_BUCKETS,
        ),
        Metric(
            "vllm:request_queue_time_seconds", "histogram", "seconds",
            "Until the first pass over the prompt, here and on the prefill peer.",
            _MODEL_LABELS, _PHASE_BUCKETS,
        ),
        Metric(
            "vllm:request_prefill_time_seconds", "histogram", "seconds",
            "From the first pass over the prompt to the first token.",
            _MODEL_LABELS, _PHASE_BUCKETS,
        ),
        Metric(
            "vllm:request_decode_time_seconds", "histogram", "seconds",
            "From the first to the last token.", _MODEL_LABELS, _PHASE_BUCKETS,
        ),
        Metric(
            "vllm:request_inference_time_seconds", "histogram", "seconds",
            "From the first pass over the prompt to the last token.",
            _MODEL_LABELS, _PHASE_BUCKETS,
        ),
        Metric(
            "vllm:request_prompt_tokens", "histogram", "",
            "Prompt tokens of requests that ended with stop or length.",
            _MODEL_LABELS, _TOKEN_BUCKETS,
        ),
        Metric(
            "vllm:request_generation_tokens", "histogram", "",
            "Tokens generated by requests that ended with stop or length.",
            _MODEL_LABELS, _TOKEN_BUCKETS,
        ),
        Metric(
            "pdnode_request_phase_seconds", "histogram", "seconds",
            "Parts of the time to first token; they sum to it: " + ", ".join(PHASES) + ".",
            ("phase",), _PHASE_BUCKETS,
        ),
        Metric(
            "pdnode_kv_pages", "gauge", "",
            "KV pages by state: free, used, cached, reserved or quarantined.", ("state",),
        ),
        Metric(
            "pdnode_kv_transfer_bytes_total", "counter", "bytes",
            "KV bytes moved, by peer and direction (sent, received).", ("peer", "direction"),
        ),
        Metric(
            "pdnode_kv_transfer_duration_seconds", "histogram", "seconds",
            "Prefill node: from the first write of a transfer to its last completion.",
            (), _TRANSFER_BUCKETS,
        ),
        Metric(
            "pdnode_kv_transfer_post_seconds", "histogram", "seconds",
            "Prefill node: from a layer's raise to its first write.", (), _POST_BUCKETS,
        ),
        Metric("pdnode_kv_transfers_inflight", "gauge", "", "KV transfers that are not done."),
        Metric(
            "pdnode_kv_transfer_failures_total", "counter", "", "Failed KV transfers.", ("reason",)
        ),
        Metric(
            "pdnode_recomputed_total", "counter", "",
            "Prompts sent to another peer, or computed here, after a failed attempt.",
        ),
        Metric("pdnode_requests_rejected_total", "counter", "", "Requests refused with 429."),
        Metric(
            "pdnode_kv_immediates_total", "counter", "",
            "Immediates that were odd: late, early or overshoot.", ("kind",),
        ),
        Metric(
            "pdnode_kv_pages_verified_total", "counter", "",
            "KV pages compared with what was sent (completion, release), or looked at (canary).",
            ("when",),
        ),
        Metric(
            "pdnode_kv_mismatches_total", "counter", "",
            "Comparisons that found pages changed. Must be 0.", ("when",),
        ),
        Metric(
            "pdnode_kv_staged_bytes_total", "counter", "",
            "Bytes copied between GPUs and their mirrors in host memory (W140): stored for peers, "
            "fetched from them.",
            ("direction",),
        ),
        Metric("pdnode_fences_total", "counter", "", "Fences of peers and NICs.", ("cause",)),
        Metric(
            "pdnode_nic_returns_total", "counter", "",
            "Connections between two NICs that were lost and came back.",
        ),
        Metric(
            "pdnode_detours_total", "counter", "",
            "Times that memory went over the NICs of another device group: registrations of a rank "
            "(decode), layer programs (prefill).",
        ),
        Metric(
            "pdnode_peer_up", "gauge", "", "1 while the session with a peer is up.",
            ("peer", "role"),
        ),
        Metric(
            "pdnode_peer_rtt_seconds", "gauge", "seconds",
            "Round trip of the peer link's heartbeats.", ("peer",),
        ),
        Metric(
            "pdnode_nic_bytes_total", "counter", "bytes",
            "KV bytes that this node's NIC wrote (sent) or that landed through it (received).",
            ("nic", "direction"),
        ),
        Metric(
            "pdnode_nic_errors_total", "counter", "", "Failed writes of a NIC.", ("nic", "kind")
        ),
        Metric(
            "pdnode_nic_wire_bytes_total", "counter", "bytes",
            "All bytes that the kernel or the NIC counted; absent where it does not count.",
            ("nic", "direction"),
        ),
        Metric(
            "pdnode_nic_wire_errors_total", "counter", "",
            "Trouble that the kernel or the NIC counted; absent where it does not count.",
            ("nic", "kind"),
        ),
        Metric(
            "pdnode_nic_link_speed_bytes_per_second", "gauge", "bytes_per_second",
            "Link speed of a NIC, one direction; absent where it is not known.", ("nic",),
        ),
        Metric("pdnode_queue_depth", "gauge", "", "Entries of a bounded queue.", ("queue",)),
        Metric("pdnode_queue_limit", "gauge", "", "Most entries of a bounded queue.", ("queue",)),
        Metric(
            "pdnode_local_prefills_total", "counter", "",
            "Prompts that a decode node computed by itself.", ("reason",),
        ),
        Metric("pdnode_steps_total", "counter", "", "Forward passes."),
        Metric(
            "pdnode_warning", "gauge", "",
            "Warnings shown now, by code; docs/operations.md explains each.", ("code", "severity"),
        ),
        Metric(
            "pdnode_telemetry_dropped_total", "counter", "",
            "What this node could not keep to show: log lines held back.", ("kind",),
        ),
        Metric("pdnode_role_info", "gauge", "", "1 for the role of this node.", ("role",)),
        Metric("pdnode_build_info", "gauge", "", "1 for the version that runs.", ("version",)),
        Metric(
            "pdnode_http_unknown_fields_total", "counter", "",
            "Fields of request bodies that were ignored because nobody knows them.", ("route",),
        ),
    )
}  # fmt: skip
