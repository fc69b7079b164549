"""A prefill and a decode node on one GPU, over tcp by staged regions."""

from pathlib import Path

import pytest

from tests.gpu.conftest import Report
from tests.support.model import smollm2_dir
from tests.support.nodes import NodeSpec, clients, nodes
from tests.support.reference import load_reference

SIZES, TOKENS = (2, 17, 65, 197, 1500), 16
START_S = 400

pytestmark = pytest.mark.timeout(START_S + 200)


async def test_prefill_and_decode_on_one_gpu(tmp_path: Path, report: Report) -> None:
    """Digests say that every page arrived as it was sent. Tokens are compared with float32's, of
    which bfloat16 may leave some; noise would leave none."""
    shared = {
        "engine": {"device": "cuda", "dtype": "auto", "gpus": ["0"], "start_timeout_s": START_S},
        "kv": {"pool_bytes": "512MiB", "page_tokens": 64},
        "peer": {"verify": "twice"},
    }
    prefill = NodeSpec("pf", "prefill", smollm2_dir(), tmp_path, **shared)
    decode = NodeSpec("dc", "decode", smollm2_dir(), tmp_path, (prefill,), **shared)
    grid = load_reference().grid
    equal = 0
    with nodes(prefill, decode) as running:
        async with clients(prefill, decode) as found:
            for client, node in zip(found, running, strict=True):
                await client.wait_ready(node)
            client = found[1]
            for size in SIZES:
                case = grid[size]
                status, body, headers = await client.post(
                    case.prompt, TOKENS, return_token_ids=True
                )
                assert status == 200, body
                assert headers["X-Pdnode-Prefill"] == "pf"
                tokens = body["choices"][0]["token_ids"]
                equal += sum(a == b for a, b in zip(tokens, case.tokens, strict=False))
            shown = await client.metrics()
            assert shown['pdnode_warning{code="W140",severity="warning"}'] == 1
            for client in found:
                await client.wait_no_pages()
    report("P and D on one GPU: tokens as float32", 100 * equal / len(SIZES) / TOKENS, "%")
    assert equal >= len(SIZES) * TOKENS / 2
