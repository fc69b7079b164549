"""SIGTERM with eight streams and two transfers in flight: time enough, and too little."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.nodes import Client, NodeSpec, cluster, transfers, until
from tests.support.prompts import random_prompt
from tests.support.streams import started_stream, tokens

pytestmark = pytest.mark.timeout(240)

STREAMS, OUTPUT = 8, 250
LONG = [random_prompt(2000, seed=seed) for seed in (1, 2)]


def pair(model: Path, folder: Path, **node: object) -> tuple[NodeSpec, NodeSpec]:
    engine = {"chunk_tokens": 64}
    prefill = NodeSpec("pf", "prefill", model, folder, engine=engine)
    decode = NodeSpec("dc", "decode", model, folder, (prefill,), engine=engine, node=node)
    return prefill, decode


async def under_load(p: Client, d: Client) -> tuple[list[list[dict]], list[asyncio.Task]]:
    """Events of eight streams that run; their tasks, and those of two long prompts under way."""
    streams = [await started_stream(d, random_prompt(20, seed=n), OUTPUT) for n in range(STREAMS)]
    tasks = [asyncio.create_task(d.post(prompt, 3)) for prompt in LONG]
    await p.wait_transfers(2)
    return [events for events, _ in streams], [*(task for _, task in streams), *tasks]


async def test_everything_finishes_within_the_bound(slow_model: Path, tmp_path: Path) -> None:
    prefill, decode = pair(slow_model, tmp_path)
    async with cluster(prefill, decode) as (running, (p, d)):
        events, tasks = await under_load(p, d)
        running[1].send_signal(signal.SIGTERM)
        *_, first, second = await asyncio.gather(*tasks)
        assert [tokens(each) for each in events] == [OUTPUT] * STREAMS
        for status, body, _ in (first, second):
            assert status == 200, body
            assert body["usage"]["completion_tokens"] == 3
        assert await running[1].ended() == 0
        await p.wait_no_pages()
        outcomes = [one.outcome for one in await transfers(prefill)]
        assert outcomes == ["drained"] * (STREAMS + 2)


async def test_a_bound_that_is_too_short(slow_model: Path, tmp_path: Path) -> None:
    """Exit 143, clients hear an error object, the prefill node is told and has its pages back."""
    prefill, decode = pair(slow_model, tmp_path, shutdown_timeout_s=0.1)
    async with cluster(prefill, decode) as (running, (p, d)):
        events, tasks = await under_load(p, d)
        running[1].send_signal(signal.SIGTERM)
        *_, first, second = await asyncio.gather(*tasks)
        cut = [each for each in events if tokens(each) < OUTPUT]
        assert cut
        for each in cut:
            assert each[-1]["error"]["code"] == "unavailable", each[-1]
        assert 503 in (first[0], second[0])
        for status, body, _ in (first, second):
            assert status == 200 or body["error"]["code"] == "unavailable", body
        assert await running[1].ended() == 143
        await p.wait_no_pages()
        await until(lambda: "session.fenced" in running[0].text(), "the prefill node lets go")
        assert (await transfers(prefill))[-1].outcome in ("link_lost", "cancelled")
