"""One NIC on one side and four on the other: every NIC carries pages, the answers are right."""

from pathlib import Path

import pytest

from tests.support.nodes import NodeSpec, cluster
from tests.support.prompts import random_prompt


def loopback(count: int) -> list[dict[str, object]]:
    """`[[fabric.nics]]` on addresses of loopback."""
    return [{"name": f"nic{n}", "address": f"127.0.0.{n + 2}"} for n in range(count)]


@pytest.mark.parametrize(("there", "here"), [(1, 4), (4, 1)])
async def test_unequal_numbers_of_nics(
    tiny_model: Path, tmp_path: Path, there: int, here: int
) -> None:
    peer = {"verify": "twice"}
    kv = {"page_tokens": 16}
    prefill = NodeSpec(
        "pf", "prefill", tiny_model, tmp_path, peer=peer, kv=kv, nics=loopback(there)
    )
    decode = NodeSpec(
        "dc", "decode", tiny_model, tmp_path, (prefill,), peer=peer, kv=kv, nics=loopback(here)
    )
    plain = NodeSpec("co", "colocated", tiny_model, tmp_path, kv=kv)
    prompts = [random_prompt(1500, seed=seed) for seed in range(3)]
    async with cluster(prefill, decode, plain) as (_, (sender, receiver, reference)):
        for prompt in prompts:
            assert await receiver.tokens(prompt, 8) == await reference.tokens(prompt, 8)
        await receiver.wait_no_pages()
        for client, way, count in ((sender, "sent", there), (receiver, "received", here)):
            metrics = await client.metrics()
            moved = [
                metrics[f'pdnode_nic_bytes_total{{direction="{way}",nic="nic{n}"}}']
                for n in range(count)
            ]
            assert min(moved) > 0, "every NIC works"
            assert max(moved) <= 1.5 * min(moved), moved  # a few writes each
