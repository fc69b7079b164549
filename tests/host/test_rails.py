"""Four NICs between two nodes: all carry the same share, one may die and come back."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode.bench.network import Rails, rails
from tests.support.admin import admin_of
from tests.support.nodes import Client, RunningNode, clients, nodes, until
from tests.support.prompts import random_prompt
from tests.support.rails import NEEDS_ROOT
from tests.support.rails_nodes import ask, pair_of

pytestmark = NEEDS_ROOT

NICS = 4
STALL_S = 2.0
PROMPTS = [random_prompt(1000, seed=seed) for seed in range(6)]


@pytest.fixture
def hosts() -> Iterator[Rails]:
    with rails(NICS, mbit=500) as found:
        yield found


async def warned(node: RunningNode) -> set[str]:
    async with admin_of(node.spec.admin) as admin:
        return {one.code for one in (await admin.snapshot()).warnings}


async def carried(hosts: Rails, client: Client, rail: int) -> bool:
    """Whether a NIC carries pages of a prompt that is sent now."""
    before = hosts.nics[rail].received_bytes()
    await ask(client, PROMPTS[0])
    return hosts.nics[rail].received_bytes() - before > 100_000


async def back(hosts: Rails, client: Client, decode: RunningNode, rail: int) -> None:
    """The NIC is in use again, and nobody warns of it any more."""
    async with asyncio.timeout(60):
        while not await carried(hosts, client, rail):
            pass
        while "W206" in await warned(decode):
            await asyncio.sleep(0.05)


async def test_four_nics_share_the_bytes_and_one_may_die(
    wide_model: Path, tmp_path: Path, hosts: Rails
) -> None:
    with nodes(*pair_of(wide_model, tmp_path, hosts)) as (_, decode):
        async with clients(decode.spec) as (client,):
            await client.wait_ready(decode)
            before = [rail.received_bytes() for rail in hosts.nics]
            reference = [await ask(client, prompt) for prompt in PROMPTS]
            # Many at once: each NIC always has a backlog, and takes what its own rate lets through.
            assert await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS * 4)) == (
                reference * 4
            )
            await client.wait_no_pages()

            kernel = [
                rail.received_bytes() - was for rail, was in zip(hosts.nics, before, strict=True)
            ]
            assert max(kernel) <= 1.1 * min(kernel), kernel
            metrics = await client.metrics()
            core = [
                metrics[f'pdnode_nic_bytes_total{{direction="received",nic="{rail.here}"}}']
                for rail in hosts.nics
            ]
            ratios = [ours / theirs for ours, theirs in zip(kernel, core, strict=True)]
            assert all(1.0 <= ratio <= 1.05 for ratio in ratios), ratios

            load = asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS * 3))
            await client.wait_transfers(1)
            hosts.nics[2].set("down")
            assert await load == reference * 3
            async with asyncio.timeout(60):  # the load may have been over before
                while "W206" not in await warned(decode):
                    assert await ask(client, PROMPTS[0]) == reference[0]
            assert not await carried(hosts, client, 2)

            hosts.nics[2].set("up")
            await back(hosts, client, decode, 2)
            assert [await ask(client, prompt) for prompt in PROMPTS] == reference
            await client.wait_no_pages()
            assert (await client.metrics())["pdnode_nic_returns_total"] >= 1


async def test_the_sender_gives_up_and_the_link_is_back_before_the_fence(
    wide_model: Path, tmp_path: Path, hosts: Rails
) -> None:
    """What waits in the sender's sockets then still arrives, at a node that has not fenced."""
    with nodes(*pair_of(wide_model, tmp_path, hosts, stall_s=STALL_S)) as (prefill, decode):
        async with clients(decode.spec) as (client,):
            await client.wait_ready(decode)
            reference = [await ask(client, prompt) for prompt in PROMPTS]

            load = asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS * 3))
            await client.wait_transfers(1)
            hosts.nics[1].set("down")
            await asyncio.sleep(STALL_S / 2)  # so that the other NICs stand still later than this
            decode.send_signal(signal.SIGSTOP)
            await until(lambda: "nic.stalled" in prefill.text(), "the sender gives up")
            hosts.nics[1].set("up")
            decode.send_signal(signal.SIGCONT)
            assert await load == reference * 3
            await back(hosts, client, decode, 1)
            assert [await ask(client, prompt) for prompt in PROMPTS] == reference
            await client.wait_no_pages()
