"""Clients that leave at any moment: others are not disturbed, and every page comes back."""

import asyncio
import contextlib
import random
import sys
from pathlib import Path

import pytest

from tests.support.nodes import Client, NodeSpec, cluster, requests, transfers
from tests.support.prompts import random_prompt

SEED = 20
LEAVERS = 30
UNDISTURBED_TOKENS = 150
STAYING = [random_prompt(length, seed=7) for length in (1, 40, 300, 700)]

pytestmark = pytest.mark.timeout(300)


async def leave(client: Client, draw: random.Random, *, number: int) -> None:
    """A request that is dropped: by turns after some tokens, after some time, in mid-stream or not.

    Only the first kind is sure to come to its first token, on any machine.
    """
    prompt = random_prompt(draw.choice([2, 100, 600, 1500]), seed=number)
    after_s, after_tokens = draw.uniform(0.0, 1.5), draw.randrange(1, 20)
    await asyncio.sleep(draw.uniform(0.0, 1.5))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if number % 3 == 0 else after_s):
            if number % 3 == 1:
                await client.complete(prompt, 400)
                return
            async with contextlib.aclosing(client.events(prompt, 400)) as events:
                for _ in range(after_tokens):
                    await anext(events)


async def stay(client: Client, prompt: list[int]) -> list[int]:
    tokens: list[int] = []
    async for event in client.events(prompt, UNDISTURBED_TOKENS):
        tokens += event["choices"][0]["token_ids"]
    return tokens


async def test_leaving_disturbs_nobody(slow_model: Path, tmp_path: Path) -> None:
    """30 clients leave: while queued for pages, in prefill, in decode, streaming or not."""
    # Pages for about 6,000 tokens on one side and 4,000 on the other: some must wait for others.
    engine = {"chunk_tokens": 64}
    kv = {"pool_bytes": "32MiB"}
    prefill = NodeSpec("pf", "prefill", slow_model, tmp_path, engine=engine, kv=kv)
    kv = {"pool_bytes": "48MiB"}
    decode = NodeSpec("dc", "decode", slow_model, tmp_path, (prefill,), kv=kv)
    async with cluster(prefill, decode) as (running, (p, d)):
        wanted = [await stay(d, prompt) for prompt in STAYING]
        before = await requests(decode)
        draw = random.Random(SEED)
        async with asyncio.TaskGroup() as group:
            staying = [group.create_task(stay(d, prompt)) for prompt in STAYING]
            for number in range(LEAVERS):
                own = random.Random(draw.random())
                group.create_task(leave(d, own, number=number))
        assert [task.result() for task in staying] == wanted
        for client in (p, d):
            await client.wait_no_pages()
            assert (await client.metrics())["pdnode_kv_transfers_inflight"] == 0
        ended = (await requests(decode))[len(before) :]
        left = [record for record in ended if record.finish == "abort"]
        phases = {
            "queued": sum(record.prefill_s == 0 and not record.output_tokens for record in left),
            "in decode": sum(record.output_tokens > 0 for record in left),
        }
        moved = await transfers(prefill)
        phases["in prefill"] = sum(record.outcome == "cancelled" for record in moved)
        sys.stdout.write(f"left {phases}\n")
        assert phases["in decode"] > 0
        assert phases["queued"] + phases["in prefill"] > 0
        assert (await stay(d, STAYING[1])) == wanted[1]
        assert [node.stop() for node in running] == [0, 0]
        assert not any("leaked" in node.text() for node in running), "the core was let go"
