"""Peers that do not fit: refused by name, with both values, on both sides, and tried again."""

from pathlib import Path

import pytest

from pdnode.models.fingerprint import fingerprint
from tests.support.nodes import Client, NodeSpec, RunningNode, clients, nodes, until
from tests.support.prompts import random_prompt
from tests.support.tiny_model import write_tiny_llama

NO_PREFILL = "no usable prefill peer, and when_no_prefill is refuse"
PROMPT = random_prompt(40, seed=1)

pytestmark = pytest.mark.timeout(300)


async def refused(client: Client, node: RunningNode, prefill: RunningNode, text: str) -> None:
    """Both logs say `text` from their side, and the policy of the node decides what it serves."""
    field, here, there = text.split("|")
    await until(lambda: f"{field}: {here} here, {there} there" in node.text(), node.spec.name)
    await until(lambda: f"{field}: {there} here, {here} there" in prefill.text(), node.spec.name)
    status, _, headers = await client.post(PROMPT, 2)
    if node.spec.policy == "local":
        assert await client.ready() == (200, [])
        assert (status, headers["X-Pdnode-Prefill"]) == (200, "local")
    else:
        assert await client.ready() == (503, [NO_PREFILL])
        assert (status, headers["Retry-After"]) == (503, "1")


async def test_every_difference_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    """One prefill, and four decode nodes that differ from it in one thing each."""
    other = write_tiny_llama(tmp_path / "other", seed=1)
    deeper = write_tiny_llama(tmp_path / "deeper", layers=5)
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path)

    def decode(name: str, model: Path = tiny_model, **fields: object) -> NodeSpec:
        peer = {"reconnect_max_s": 0.5}
        return NodeSpec(name, "decode", model, tmp_path, (prefill,), peer=peer, **fields)

    mine, theirs = (f"{fingerprint(path)[:16]} (test-model)" for path in (other, tiny_model))
    table = {
        f"fingerprint|{mine}|{theirs}": decode("other", other),
        "layers|5|4": decode("deeper", deeper, policy="local"),
        "page_tokens|32|16": decode("pages", kv={"page_tokens": 32}, policy="local"),
        "dtype|bfloat16|float32": decode("dtype", kv={"dtype": "bfloat16"}),
    }
    with nodes(prefill, *table.values()) as (first, *others):
        async with clients(*table.values()) as found:
            for client, node in zip(found, others, strict=True):
                await client.wait_ready(node, status=200 if node.spec.policy == "local" else 503)
            for text, client, node in zip(table, found, others, strict=True):
                await refused(client, node, first, text)

            # It is tried again for ever: a prefill that fits one of them by now is taken.
            assert first.stop() == 0
            prefill.kv = {"dtype": "bfloat16"}
            with nodes(prefill):
                await found[3].wait_ready(others[3])
                status, _, headers = await found[3].post(PROMPT, 2)
                assert (status, headers["X-Pdnode-Prefill"]) == (200, "pf")
