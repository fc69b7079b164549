"""One prefill node, three decode nodes, one of which floods it: the others hardly wait longer.

A wait is measured in passes of the prefill node, not in seconds: those that ran between a request's
arrival and its own first one. Both are times of the prefill node's one monotonic clock.
"""

import asyncio
import contextlib
import statistics
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdnode.obs.records import TransferRecord
from tests.support.nodes import PATIENT, Client, NodeSpec, cluster, transfers
from tests.support.prompts import random_prompt

CHUNK_TOKENS = 64
LONG_TOKENS = 1900  # 30 chunks
FLOOD = 40  # long prompts at a time
OWN_SIZES = (40, 200, 500)
ROUNDS = 5
QUIET_NODES = ("dc1", "dc2")
MOST_RATIO = 2.0

pytestmark = pytest.mark.timeout(600)


@contextlib.asynccontextmanager
async def pressure(client: Client, at_a_time: int) -> AsyncIterator[None]:
    """So many long prompts are always on their way."""

    async def one(number: int) -> None:
        turn = 0
        while True:
            turn += 1
            await client.tokens(random_prompt(LONG_TOKENS, seed=1000 * number + turn), 1)

    tasks = [asyncio.create_task(one(number)) for number in range(at_a_time)]
    try:
        await client.wait_transfers(1)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask(client: Client, wanted: dict[int, list[int]]) -> None:
    """One prompt after the other; the tokens are those of a node without a flood."""
    for _ in range(ROUNDS):
        for size, tokens in wanted.items():
            assert await client.tokens(random_prompt(size, seed=2), 4) == tokens, size


def waited_passes(record: TransferRecord, passes_ns: list[int]) -> int:
    """Passes of the prefill node while this request waited for its first one."""
    first_ns = min(row.raised_ns for row in record.layers if row.layer == 0)
    come_ns = first_ns - int(record.queue_s * 1e9)
    return sum(come_ns < at < first_ns for at in passes_ns)


async def measured(prefill: NodeSpec, before: set[str]) -> list[int]:
    """Waits of the quiet nodes' requests since `before`, in passes."""
    found = await transfers(prefill)
    passes_ns = sorted({row.raised_ns for one in found for row in one.layers if row.layer == 0})
    return [
        waited_passes(one, passes_ns)
        for one in found
        if one.peer in QUIET_NODES and one.key not in before
    ]


async def test_a_flood_of_long_prompts_delays_others_little(
    tiny_model: Path, tmp_path: Path
) -> None:
    # The prefill node has pages for eight long prompts, and places for fewer than the flood sends.
    engine = {"chunk_tokens": CHUNK_TOKENS, "max_waiting": 24}
    prefill = NodeSpec(
        "pf", "prefill", tiny_model, tmp_path,
        engine=engine, kv={"pool_bytes": "16MiB"}, peer=PATIENT,
    )  # fmt: skip
    names = ("flood", *QUIET_NODES)
    decodes = [
        NodeSpec(name, "decode", tiny_model, tmp_path, (prefill,), peer=PATIENT) for name in names
    ]
    async with cluster(prefill, *decodes) as (_, (p, flood, *quiet)):
        wanted = {size: await quiet[0].tokens(random_prompt(size, seed=2), 4) for size in OWN_SIZES}
        waits: list[list[int]] = []
        for at_a_time in (1, FLOOD):
            before = {record.key for record in await transfers(prefill)}
            async with pressure(flood, at_a_time), asyncio.TaskGroup() as group:
                for client in quiet:
                    group.create_task(ask(client, wanted))
            waits.append(await measured(prefill, before))
        level, flooded = (statistics.mean(found) for found in waits)
        sys.stdout.write(
            f"passes waited by {len(waits[0])} and {len(waits[1])} requests: mean {level:.2f} and "
            f"{flooded:.2f} in a flood, at most {max(waits[0])} and {max(waits[1])}\n"
        )
        requests = len(QUIET_NODES) * ROUNDS * len(OWN_SIZES)
        assert [len(found) for found in waits] == [requests] * 2
        assert flooded <= MOST_RATIO * max(level, 1.0)
        for client in (p, flood, *quiet):
            await client.wait_no_pages()
