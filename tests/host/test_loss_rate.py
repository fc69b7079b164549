"""One of four NICs that are the bottleneck goes down: the three that are left do its work.

Prints what passed before and after (`pytest -s`); how fast it is is no assertion.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode.bench.network import Rails, rails
from tests.support.nodes import Client, clients, nodes
from tests.support.prompts import random_prompt
from tests.support.rails import NEEDS_ROOT
from tests.support.rails_nodes import pair_of

pytestmark = [NEEDS_ROOT, pytest.mark.timeout(300)]

PROMPTS = [random_prompt(1000, seed=seed) for seed in range(4)]
DOWN = 2
LARGEST_WRITE_BYTES = 1 << 20


@pytest.fixture
def hosts() -> Iterator[Rails]:
    with rails(4, mbit=10) as found:
        yield found


async def load(client: Client, hosts: Rails, name: str) -> list[int]:
    """All prompts at once; the bytes of each NIC."""
    before = [rail.received_bytes() for rail in hosts.nics]
    begun_at = time.monotonic()
    answers = await asyncio.gather(*(client.post(prompt, 2) for prompt in PROMPTS))
    lasted_s = time.monotonic() - begun_at
    assert [status for status, _, _ in answers] == [200] * len(PROMPTS)
    moved = [rail.received_bytes() - was for rail, was in zip(hosts.nics, before, strict=True)]
    print(f"{name}: {sum(moved) * 8e-6 / lasted_s:.1f} Mbit/s in {lasted_s:.1f} s")  # noqa: T201 - for -s
    return moved


async def test_the_nics_that_are_left_carry_all_in_equal_shares(
    wide_model: Path, tmp_path: Path, hosts: Rails
) -> None:
    # A full write takes almost a second at this rate, which is no stall.
    with nodes(*pair_of(wide_model, tmp_path, hosts, stall_s=5.0)) as (_, decode):
        async with clients(decode.spec) as (client,):
            await client.wait_ready(decode)
            before = await load(client, hosts, "four NICs")
            hosts.nics[DOWN].set("down")
            await load(client, hosts, "while one is lost")
            after = await load(client, hosts, "three NICs")
    lost = after.pop(DOWN)
    assert lost < 0.01 * sum(after)
    assert max(after) - min(after) <= 2.5 * LARGEST_WRITE_BYTES, after
    assert 0.97 * sum(before) <= sum(after) <= 1.1 * sum(before)
