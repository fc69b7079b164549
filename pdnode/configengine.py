"""The keys of `[engine]` and `[kv]`: the model's device, and the memory of its pages."""

from pdnode.configkeys import Key, Table
from pdnode.configkinds import AUTO_WORD, Choice, Flag, Integer, Names, Number, Size
from pdnode.types import RegionKind

_DTYPES = Choice((AUTO_WORD, "float32", "bfloat16", "float16"))

ENGINE = Table(
    "engine",
    "The worker process that runs the model.",
    (
        Key(
            "device",
            Choice((AUTO_WORD, "cpu", "cuda")),
            "cpu",
            "Where the model runs. auto: on a GPU if driver, CUDA torch, cuda-python and "
            "FlashInfer are there, else on the CPU. Not yet run on a GPU: docs/gpu.md.",
        ),
        Key(
            "dtype",
            _DTYPES,
            AUTO_WORD,
            "Of weights and activations. auto: float32 on CPU, bfloat16 on CUDA.",
        ),
        Key(
            "tp",
            Integer(1, 64),
            1,
            "Tensor parallelism: worker processes that share the model, each with its part of "
            "heads, weights and KV. May differ between peers. On CPU it is slower than 1.",
        ),
        Key(
            "threads",
            Integer(1, 1024, auto=True),
            AUTO_WORD,
            "Threads of a worker. auto: cores of its NUMA node minus one, over all workers.",
        ),
        Key(
            "chunk_tokens",
            Integer(16, 1 << 20),
            512,
            "Token budget of one pass; prompts run in chunks of it. A multiple of page_tokens.",
        ),
        Key("max_running", Integer(1, 65536), 64, "Sequences in one pass.", reload=True),
        Key(
            "max_waiting",
            Integer(0, 1 << 20),
            256,
            "Requests that may wait; one more is refused with 429. A prefill node shares them "
            "among its peers: one may hold as many as it leaves free.",
            reload=True,
        ),
        Key(
            "max_restarts",
            Integer(0, 1000),
            5,
            "Starts of another engine inside the daemon after deaths in a row; then it exits with "
            "70, for the unit to start it again.",
        ),
        Key(
            "start_timeout_s",
            Number(1, 86400),
            300.0,
            "How long a worker may take to load the model and warm up.",
        ),
        Key(
            "stall_s",
            Number(1, 86400),
            60.0,
            "Where a pass finishes no layer for so long its workers are killed, and another engine "
            "is started.",
        ),
        Key(
            "dp",
            Integer(1, 64),
            1,
            "TP groups of this node: each has the whole model, its own queue and its own pages.",
        ),
        Key(
            "gpus",
            Names(most=4096, patterns=False),
            (),
            "GPUs of the workers, by group: PCI addresses, UUIDs or numbers. Empty: the first.",
        ),
        Key(
            "cuda_graphs",
            Flag(),
            True,
            "Record decode passes on CUDA once per batch size and replay them. Not with experts, "
            "not with tp above 1.",
        ),
    ),
)

KV = Table(
    "kv",
    "The paged KV cache. page_tokens and dtype must be the same on all peers.",
    (
        Key(
            "page_tokens",
            Integer(1, 1024, auto=True),
            AUTO_WORD,
            "Tokens of one page. auto: 16 on CPU, 64 on CUDA.",
        ),
        Key(
            "pool_bytes",
            Size(1 << 20, 1 << 44, auto=True),
            AUTO_WORD,
            "Memory for the pages of a TP group. auto: a share of what is free after loading.",
        ),
        Key("dtype", _DTYPES, AUTO_WORD, "Of keys and values. auto: as engine.dtype."),
        Key(
            "region",
            Choice((AUTO_WORD, *RegionKind)),
            AUTO_WORD,
            "Where the pages are. memfd: host memory. cumem: the GPU's, which verbs and efa reach "
            "by dma-buf. staged: the GPU's with a mirror in host memory, one more copy each way. "
            "auto: memfd on CPU, cumem where NIC and driver can, else staged.",
        ),
        Key(
            "max_quarantined_ratio",
            Number(0.01, 1),
            0.5,
            "Share of the pool that may wait for a fence; above it nothing is admitted.",
            reload=True,
        ),
        Key(
            "canary_pages",
            Integer(0, 1024),
            0,
            "Decode only: pages that are set aside all over the pool and that nobody may write to; "
            "looked at every second. For tests and for the search for a fault. Host memory only.",
        ),
    ),
)
