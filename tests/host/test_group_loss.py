"""Two device groups of two NICs each, a rank for each: one group loses all its NICs under load."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode.bench.network import Rails, rails
from tests.support.admin import admin_of
from tests.support.nodes import Client, RunningNode, clients, nodes
from tests.support.prompts import random_prompt
from tests.support.rails import NEEDS_ROOT
from tests.support.rails_nodes import ask, pair_of

pytestmark = [NEEDS_ROOT, pytest.mark.timeout(300)]

PROMPTS = [random_prompt(1000, seed=seed) for seed in range(4)]
OWN, OTHER = (0, 1), (2, 3)  # NICs of the group that is lost, and of the one that stands in


@pytest.fixture
def hosts() -> Iterator[Rails]:
    with rails(4, mbit=500) as found:
        yield found


async def carried(hosts: Rails, client: Client) -> list[bool]:
    """Which NICs carry pages of a prompt that is sent now."""
    before = [rail.received_bytes() for rail in hosts.nics]
    await ask(client, PROMPTS[0])
    return [
        rail.received_bytes() - was > 100_000 for rail, was in zip(hosts.nics, before, strict=True)
    ]


async def warned(*running: RunningNode) -> list[set[str]]:
    found = []
    for node in running:
        async with admin_of(node.spec.admin) as admin:
            found.append({one.code for one in (await admin.snapshot()).warnings})
    return found


async def test_all_nics_of_a_group_go_down_and_the_other_group_carries_its_memory(
    wide_model: Path, tmp_path: Path, hosts: Rails
) -> None:
    with nodes(*pair_of(wide_model, tmp_path, hosts, groups=2)) as (prefill, decode):
        async with clients(decode.spec) as (client,):
            await client.wait_ready(decode)
            reference = [await ask(client, prompt) for prompt in PROMPTS]
            assert await carried(hosts, client) == [True] * 4
            metrics = await client.metrics()
            assert metrics["pdnode_detours_total"] == 0

            load = asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS * 3))
            await client.wait_transfers(1)
            for rail in OWN:
                hosts.nics[rail].set("down")
            assert await load == reference * 3
            async with asyncio.timeout(60):  # the load may have been over before
                while not all("W207" in codes for codes in await warned(prefill, decode)):
                    assert await ask(client, PROMPTS[0]) == reference[0]
            assert await carried(hosts, client) == [False, False, True, True]
            assert [await ask(client, prompt) for prompt in PROMPTS] == reference
            metrics = await client.metrics()
            assert metrics["pdnode_detours_total"] == 1, "one rank, once"

            for rail in OWN:
                hosts.nics[rail].set("up")
            async with asyncio.timeout(120):
                while any(codes & {"W206", "W207"} for codes in await warned(prefill, decode)):
                    await asyncio.sleep(0.05)
            assert await carried(hosts, client) == [True] * 4
            assert [await ask(client, prompt) for prompt in PROMPTS] == reference
            await client.wait_no_pages()
            metrics = await client.metrics()
            mismatches = [metrics[name] for name in metrics if "mismatches" in name]
            assert mismatches
            assert not any(mismatches)
