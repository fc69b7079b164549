"""The snapshot: all that a node shows of itself, as one JSON document (`GET /admin/v1/snapshot`).

The contract between the daemon, which builds it, and the console and scripts, which read it.
Changes are additive only: a field is never renamed, retyped or given another meaning, and a new
one has a default, so that either side may be older than the other (`protocol` tells how old).

`None` is "not available here", and never the same as 0. Units end the name: `_s` seconds,
`_us` microseconds, `_ratio` 0..1, rates are bytes or tokens per second. Times of day are seconds
since 1970 and serve for display; all else are durations on this node's monotonic clock. Strings
that come from elsewhere (names, errors, request ids) are raw: whoever shows them escapes them.
"""

from typing import Final

import msgspec

PROTOCOL: Final = 1
"""Raised with every additive change that a reader may want to know of."""

MAX_TRANSFERS: Final = 64
MAX_REQUESTS: Final = 128
MAX_EVENTS: Final = 32
MAX_WARNINGS: Final = 32
MAX_LAYERS: Final = 256
HISTORY: Final = 60
"""Most entries of the lists; what is left out is the youngest (events: the oldest)."""


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all parts: frozen, by keyword, without references that could form a cycle."""


class Node(Record, frozen=True, kw_only=True):
    """Who this is."""

    id: str
    boot: str  # random per start of the daemon: another one means that it restarted
    role: str  # prefill | decode | colocated
    state: str  # loading | serving | draining | failed
    version: str
    uptime_s: float
    detail: str = ""  # what `state` means now: "weights 40 %", "the worker died"
    protocol_min: int | None = None  # peer protocol
    protocol_max: int | None = None
    provider: str | None = None  # of the fabric; None: no fabric (colocated)
    libfabric: str | None = None


class Model(Record, frozen=True, kw_only=True):
    """What is served."""

    name: str
    dtype: str | None = None
    layers: int | None = None
    context_tokens: int | None = None
    page_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    device: str | None = None  # cpu | cuda
    device_reason: str = ""  # why it is this one


class Queue(Record, frozen=True, kw_only=True):
    """A bounded queue, or another number of entries with a limit."""

    name: str  # waiting | kv-wait | running | kv-drain | prefill
    now: int
    peak: int | None = None  # since start
    limit: int | None = None


class Pages(Record, frozen=True, kw_only=True):
    """KV pages by state; the five states sum to `total`."""

    total: int
    free: int
    used: int
    cached: int
    reserved: int
    quarantined: int
    used_ratio: float  # of pages that are not free
    quarantined_limit: int | None = None


class Group(Record, frozen=True, kw_only=True):
    """One TP group: its pages, and the sequences in its schedule."""

    pages: int
    pages_free: int
    waiting: int  # with prompt left to compute
    running: int  # that decode


class Transfer(Record, frozen=True, kw_only=True):
    """A KV transfer that is not over."""

    request_id: str
    peer: str
    state: str  # queue | prefill | wire | drain
    tokens: int
    pages: int
    age_s: float
    pages_done: float | None = None  # units done / units a page has: fractions are real
    layers: int | None = None
    layer: int | None = None  # layers complete
    layer_posted: int | None = None  # layers whose writes went out
    bytes: int | None = None
    bytes_done: int | None = None
    bytes_per_s: float | None = None


class Request(Record, frozen=True, kw_only=True):
    """A request that is not over, on the node that took it."""

    request_id: str
    state: str  # waiting | kv-wait | running
    age_s: float
    prompt_tokens: int
    output_tokens: int = 0
    peer: str | None = None  # who computes or computed the prompt; None: not decided, or local


class LayerMark(Record, frozen=True, kw_only=True):
    """One layer of one transfer, in µs from the transfer's start; the last chunk's where several.

    raised: the worker finished the layer. posted: its first write went out. done: all came back.
    """

    layer: int
    raised_us: int | None = None
    posted_us: int | None = None
    done_us: int | None = None


class Phases(Record, frozen=True, kw_only=True):
    """Where the time to first token went; the five sum to `ttft_s`. On the requester's clock."""

    admit_s: float | None = None
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    transfer_wait_s: float | None = None
    first_step_s: float | None = None
    ttft_s: float | None = None


class SlowTransfer(Record, frozen=True, kw_only=True):
    """The last transfer that took far longer than the median, with what each layer did."""

    request_id: str
    peer: str
    outcome: str  # done, or the cause of failure
    tokens: int
    pages: int
    total_s: float
    ended_s: float  # ago
    bytes: int | None = None
    phases: Phases | None = None
    layers: tuple[LayerMark, ...] = ()


class Quantiles(Record, frozen=True, kw_only=True):
    """Of the last 60 s; None where nothing ended."""

    count: int
    p50_s: float | None = None
    p99_s: float | None = None


class Latency(Record, frozen=True, kw_only=True):
    """TTFT with its phases, and ITL, of requests that this node took in the last 60 s."""

    ttft: Quantiles
    itl: Quantiles
    admit: Quantiles | None = None
    prefill_queue: Quantiles | None = None
    prefill: Quantiles | None = None
    transfer_wait: Quantiles | None = None
    first_step: Quantiles | None = None
    total: Quantiles | None = None


class Summary(Record, frozen=True, kw_only=True):
    """What ended in the last `window_s` (60, less after a start)."""

    window_s: float
    transfers: Quantiles  # those that succeeded, first write to last completion
    transfers_failed: int
    requests_done: int
    requests_failed: int = 0
    requests_aborted: int = 0  # the client went away, or somebody cancelled
    rejected: int = 0  # 429
    recomputed: int = 0  # prompts computed again, here or on another peer, after a failure
    preempted: int | None = None
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None


class NicErrors(Record, frozen=True, kw_only=True):
    """One kind of error of a NIC."""

    kind: str
    total: int
    per_s: float | None = None


class NicPeer(Record, frozen=True, kw_only=True):
    """One peer's share of a NIC."""

    peer: str
    rx_bytes_per_s: float | None = None
    tx_bytes_per_s: float | None = None


class Nic(Record, frozen=True, kw_only=True):
    """A NIC in use. Peaks are the highest of one second since start."""

    name: str
    state: str  # up | down
    provider: str | None = None
    address: str | None = None
    gpu: int | None = None
    numa: int | None = None
    line_bytes_per_s: float | None = None  # link speed, one direction
    rx_bytes_per_s: float | None = None
    tx_bytes_per_s: float | None = None
    rx_peak_bytes_per_s: float | None = None
    tx_peak_bytes_per_s: float | None = None
    rx_history: tuple[int, ...] = ()  # bytes per s of the last HISTORY seconds, oldest first
    tx_history: tuple[int, ...] = ()
    errors: tuple[NicErrors, ...] = ()
    peers: tuple[NicPeer, ...] = ()
    counters: str | None = None  # where the rates come from: kernel | fabric


class Rail(Record, frozen=True, kw_only=True):
    """A NIC that a GPU (or the host's memory) uses, and why that one."""

    nic: str
    distance: str | None = None  # PIX | PXB | PHB | NODE | SYS
    why: str | None = None


class Gpu(Record, frozen=True, kw_only=True):
    """A GPU with its rails."""

    index: int
    name: str | None = None
    numa: int | None = None
    busy_ratio: float | None = None
    memory_ratio: float | None = None
    rails: tuple[Rail, ...] = ()


class Numa(Record, frozen=True, kw_only=True):
    """A NUMA node of the host."""

    index: int
    cpus: str | None = None  # "0-55"
    memory_ratio: float | None = None
    nics: tuple[str, ...] = ()


class Topology(Record, frozen=True, kw_only=True):
    """What is known of the host."""

    numa: tuple[Numa, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    rails: tuple[Rail, ...] = ()  # of the host's memory, where there is no GPU


class Peer(Record, frozen=True, kw_only=True):
    """A configured or connected peer."""

    name: str
    role: str  # "" until known
    state: str  # connecting | refused | up | slow | drain | lost
    node: str = ""
    since_s: float | None = None  # in this state
    seen_s: float | None = None  # since its last frame; None: never
    rtt_s: float | None = None
    rx_bytes_per_s: float | None = None
    tx_bytes_per_s: float | None = None
    inflight: int | None = None  # transfers
    protocol: int | None = None  # agreed
    version: str | None = None
    pages_quarantined: int | None = None
    last_error: str = ""


class Warning(Record, frozen=True, kw_only=True):
    """A condition that lasts. docs/operations.md explains every code."""

    code: str  # W204
    severity: str  # info | warning | error
    text: str
    since_s: float
    affects_readiness: bool = False
    subjects: tuple[str, ...] = ()  # names of the peers, NICs and requests whose rows explain it


class Event(Record, frozen=True, kw_only=True):
    """Something that happened; also the data of one SSE event, whose id is `cursor`."""

    cursor: int  # rises by one per event, per boot
    time_s: float  # of day
    severity: str  # info | warning | error
    code: str
    text: str  # with its fields


class Action(Record, frozen=True, kw_only=True):
    """`POST /admin/v1/<name>`. `refused` says why it would be refused now."""

    name: str  # drain | undrain | cancel | …
    refused: str | None = None


class ActionAnswer(Record, frozen=True, kw_only=True):
    """What the daemon says to an action."""

    done: bool
    text: str


class Pending(Record, frozen=True, kw_only=True):
    """What a drain would wait for."""

    requests: int
    transfers: int
    oldest_s: float | None = None


class Snapshot(Record, frozen=True, kw_only=True):
    """The document."""

    protocol: int
    time_s: float  # of day
    node: Node
    model: Model
    ready: bool
    pages: Pages | None = None  # None: memory is not allocated yet
    groups: tuple[Group, ...] = ()  # of a node that has several; `pages` is of all
    queues: tuple[Queue, ...] = ()
    pending: Pending | None = None
    transfers_inflight: int | None = None  # all; `transfers` may show fewer
    transfers: tuple[Transfer, ...] = ()  # oldest first
    requests_open: int | None = None
    requests: tuple[Request, ...] = ()  # oldest first
    summary: Summary | None = None
    last_slow: SlowTransfer | None = None
    latency: Latency | None = None
    nics: tuple[Nic, ...] = ()
    topology: Topology | None = None
    peers: tuple[Peer, ...] = ()
    warnings: tuple[Warning, ...] = ()
    events: tuple[Event, ...] = ()  # oldest first
    actions: tuple[Action, ...] = ()


def encode(snapshot: Snapshot) -> bytes:
    """JSON."""
    return msgspec.json.encode(snapshot)


def decode(data: bytes | str) -> Snapshot:
    """Reads a document of any protocol; unknown fields are dropped.

    ValueError (msgspec.DecodeError) says what is wrong where it is none.
    """
    return msgspec.json.decode(data, type=Snapshot)
