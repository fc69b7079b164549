"""Frames between the daemon and a worker, over a SOCK_STREAM unix socket.

A frame is a little-endian u32 length and a MessagePack struct. Descriptors travel only at start:
the daemon's `Init` carries the wake eventfds of the transfer core's threads, and in a group of
several ranks the memfd over which they meet, as the last one; a worker's `Ready` carries its KV
region (a memfd, a mirror's memfd or exported memory of a GPU, as Init asked) and its counter page.
One step is in flight at a time. Every rank of a group gets every step and answers it; rank 0 alone
draws, scores and raises its layer counter. Imports no torch.
"""

import msgspec

MAX_FRAME_BYTES = 64 << 20


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Base of all frames."""


class Init(Frame, frozen=True, tag="init"):
    """First frame. `pages` 0: choose by `pool_bytes`; `pool_bytes` 0: a share of what is free."""

    model_path: str
    kv_dtype: str
    page_tokens: int
    pages: int
    pool_bytes: int
    threads: int
    max_batch_tokens: int
    dtype: str = ""  # of the weights; empty: as kv_dtype
    cpus: tuple[int, ...] = ()  # that the worker keeps to; empty: all of the daemon's
    huge_pages: bool = False  # for KV memory that a NIC pins, where the host has them
    rank: int = 0  # of the TP group
    tp: int = 1
    sharers: int = 1  # workers of this node: an automatic pool is shared among them
    region_kind: str = "memfd"  # types.RegionKind: what the region's descriptor is
    gpus: tuple[str, ...] = ()  # one a rank: number, PCI address or UUID; empty: by rank, if any
    device: str = "cpu"  # that passes run on: cpu | cuda
    graph_rows: int = 0  # most rows of a decode pass that is recorded (CUDA); 0: none is
    cache_dir: str = ""  # for kernels that are compiled at run time; empty: as the tools choose


class Ready(Frame, frozen=True, tag="ready"):
    """Weights loaded, memory allocated, one warm-up pass run. Two descriptors: region, counter."""

    kind: str
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str
    pages: int
    vocabulary: int
    context_tokens: int
    load_s: float
    memory_page_bytes: int = 4096  # the kernel's, of the KV memory
    tp: int = 1  # all ranks of a group have the same geometry


class Loading(Frame, frozen=True, tag="loading"):
    """Progress of start-up, 0..1; any number of these come before Ready."""

    ratio: float
    what: str


class LogitChanges(msgspec.Struct, frozen=True, array_like=True):
    """What is done to logits before a draw: first the repetition penalty, then the additions.

    Packed, since a long prompt repeats thousands of tokens: little-endian u32 ids, f32 numbers.
    That is at most 12 bytes per token in the KV pool: a frame has room for a pool of 5 million.
    """

    repeated: bytes  # ids whose positive logits are divided by `repetition`, negative multiplied
    repetition: float
    biased: bytes  # ids, each once
    bias: bytes  # what is added to the logit of each of them


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How to draw the next token. `temperature` 0 is greedy. `banned` is masked before drawing."""

    temperature: float
    top_k: int  # 0: off
    top_p: float  # 1.0: off
    seed: int  # of the request; with `draw` it fixes the draw
    draw: int  # number of this draw in its request
    banned: list[int]
    logprobs: int = 0  # likeliest tokens to name beside the one drawn
    changes: LogitChanges | None = None


class Scoring(msgspec.Struct, frozen=True, array_like=True):
    """Known tokens of a sequence to give log probabilities of: each follows a row of the pass.

    `targets` belong to the first rows of the sequence; the last row of a prompt has none.
    """

    targets: list[int]
    top: int  # likeliest tokens to name beside each


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one sequence in a pass, at positions start, start + 1, …"""

    sequence: int
    start: int
    tokens: list[int]
    new_pages: list[int]  # appended to this sequence's page table before the pass
    sampling: Sampling | None  # None: this pass draws nothing for the sequence
    scoring: Scoring | None = None


class Step(Frame, frozen=True, tag="step"):
    """One forward pass. The layer counter rises by `layers` while it runs, one per layer.

    `base` is the counter's value before this pass; the worker asserts that it is.
    `forget`: sequences whose page tables are dropped first. Regions on a GPU only: `fetch` are
    pages that a peer wrote and this pass is the first to read, `store` pages that it writes for a
    peer, which must be where NICs read them when their layer is raised.
    """

    pass_id: int
    base: int
    sequences: list[SequenceStep]
    forget: list[int]
    fetch: list[int] = []
    store: list[int] = []


class Drawn(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    token: int
    logprob: float
    top: list[tuple[int, float]] = []  # (token, log probability), likeliest first


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """One entry per target, in order."""

    sequence: int
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]


class StepDone(Frame, frozen=True, tag="step_done"):
    """`drawn` has one entry per sequence with sampling, in the order of the step; `scored` one
    per sequence with scoring. Both are empty from ranks other than 0."""

    pass_id: int
    drawn: list[Drawn]
    compute_s: float
    scored: list[Scored] = []


class WorkerError(Frame, frozen=True, tag="worker_error"):
    """The worker cannot go on; it exits after this."""

    text: str


class Shutdown(Frame, frozen=True, tag="shutdown"):
    pass


ToWorker = Init | Step | Shutdown
ToDaemon = Loading | Ready | StepDone | WorkerError

# Layout of the counter page (one 4 KiB memfd per worker), shared by worker and progress threads.
COUNTER_PAGE_BYTES = 4096
COUNTER_OFFSET = 0  # u64, the layer counter
SLEEPING_OFFSET = 64  # u32 per device group, 64 bytes apart: nonzero while that thread sleeps
MAX_GROUPS = 16
SILENT_OFFSET = 2048  # u32: nonzero where raising wakes no thread, since a GPU does it
