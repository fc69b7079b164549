"""A request that ends before its pages are complete: the prefill node stops within one chunk.

By the client that leaves, by the administrator, and by its own deadline.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.admin import admin_of
from tests.support.nodes import (
    EVENT_TIMEOUT_S,
    Client,
    NodeSpec,
    RunningNode,
    cluster,
    transfers,
    until,
)
from tests.support.prompts import random_prompt

CHUNK_TOKENS = 64
LONG = random_prompt(1900, seed=1)  # 30 chunks, half a second at least
CHUNKS = 30
SHORT = random_prompt(100, seed=2)
STALL_S = 1.0
WAYS = ("client", "admin", "deadline")

pytestmark = pytest.mark.timeout(300)


async def passes(client: Client) -> float:
    return (await client.metrics())["pdnode_steps_total"]


@contextlib.asynccontextmanager
async def worker_stopped(node: RunningNode) -> AsyncIterator[None]:
    """The daemon lives and answers heartbeats, and its engine does nothing."""
    (worker,) = node.children()
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def has_cancelled(prefill: RunningNode, count: int) -> bool:
    return prefill.text().count("outcome=cancelled") == count


async def end(way: str, decode: Client, prefill: Client, node: RunningNode) -> None:
    """A long prompt that ends `way` once at least one chunk of it has been computed."""
    before = await passes(prefill)
    name = f"long-{way}"
    body = {"model": "test-model", "prompt": LONG, "max_tokens": 2}
    url, headers = f"{decode.spec.url}/v1/completions", {"x-request-id": name}
    request = decode.session.post(url, json=body, headers=headers)
    task = asyncio.ensure_future(request)
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        while await passes(prefill) < before + 1:
            await asyncio.sleep(0.005)
    if way == "client":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif way == "admin":
        async with admin_of(decode.spec.admin) as admin:
            assert (await admin.post("cancel", {"request_id": name})).done
        async with await task as answer:
            assert answer.status == 499
            error = (await answer.json())["error"]
            assert (error["code"], error["message"]) == ("cancelled", "the request was cancelled")
    else:
        async with worker_stopped(node):
            async with await task as answer:
                assert answer.status == 504
                text = (await answer.json())["error"]["message"]
                assert text == f"prefill pf: no progress for {STALL_S:g} s"
            # Nothing can land any more, whatever the pass that is not over will compute.
            await decode.wait_no_pages()


async def test_the_prefill_node_stops_within_one_chunk(slow_model: Path, tmp_path: Path) -> None:
    engine, peer = {"chunk_tokens": CHUNK_TOKENS}, {"request_stall_s": STALL_S}
    prefill = NodeSpec("pf", "prefill", slow_model, tmp_path, engine=engine)
    decode = NodeSpec("dc", "decode", slow_model, tmp_path, (prefill,), peer=peer)
    async with cluster(prefill, decode) as (running, (p, d)):
        wanted = await d.tokens(SHORT, 4)
        for number, way in enumerate(WAYS, start=1):
            before = await passes(p)
            await end(way, d, p, running[0])
            await until(partial(has_cancelled, running[0], number), f"the transfer ends: {way}")
            for client in (p, d):
                await client.wait_no_pages()
            record = (await transfers(prefill))[-1]
            assert (record.outcome, record.tokens) == ("cancelled", len(LONG) - 1)
            # The pass in which the word came is the last one.
            computed = {row.chunk for row in record.layers if row.raised_ns}
            assert await passes(p) - before < CHUNKS, way
            assert await passes(p) - before <= len(computed) + 1, way
            assert await d.tokens(SHORT, 4) == wanted
        assert [node.stop() for node in running] == [0, 0]
