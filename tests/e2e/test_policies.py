"""Who computes a prompt: no prefill, one that dies or freezes, two of them, two decode nodes."""

import asyncio
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.nodes import Client, NodeSpec, cluster, nodes, requests, until
from tests.support.prompts import random_prompt

LONG = random_prompt(1500, seed=1)
TOKENS = 6
LINK_LOST_S = 1.5
MARGIN_S = 3.0

pytestmark = pytest.mark.timeout(300)


def decode_node(name: str, policy: str, model: Path, folder: Path, *prefills: NodeSpec) -> NodeSpec:
    peer = {"reconnect_max_s": 0.5, "link_lost_s": LINK_LOST_S}
    return NodeSpec(name, "decode", model, folder, prefills, policy, peer=peer)


def prefill_node(name: str, model: Path, folder: Path) -> NodeSpec:
    peer = {"link_lost_s": LINK_LOST_S}
    return NodeSpec(name, "prefill", model, folder, engine={"chunk_tokens": 64}, peer=peer)


async def ask(client: Client, prompt: list[int]) -> tuple[int, str | None, object]:
    """Status, who computed the prompt, and the tokens or the code of the error."""
    status, body, headers = await client.post(prompt, TOKENS, return_token_ids=True)
    found = body["choices"][0]["token_ids"] if status == 200 else body["error"]["code"]
    return status, headers.get("X-Pdnode-Prefill"), found


async def local_prefills(client: Client, reason: str) -> float:
    name = f'pdnode_local_prefills_total{{reason="{reason}"}}'
    return (await client.metrics()).get(name, 0.0)


async def test_a_prefill_that_dies_or_freezes(slow_model: Path, tmp_path: Path) -> None:
    """With requests of two decode nodes in flight: one helps itself, one says what happened."""
    prefill = prefill_node("pf", slow_model, tmp_path)
    helps = decode_node("helps", "local", slow_model, tmp_path, prefill)
    refuses = decode_node("refuses", "refuse", slow_model, tmp_path, prefill)
    async with cluster(helps) as ((helper,), (h,)):
        # There is none yet.
        wanted = (await ask(h, LONG))[2]
        assert (await ask(h, LONG)) == (200, "local", wanted)
        assert await local_prefills(h, "no_peer") == 2
        async with cluster(prefill, refuses) as ((first, _), (p, r)):
            await until(lambda: "session.up" in helper.text(), "both decode nodes are connected")
            assert await asyncio.gather(ask(h, LONG), ask(r, LONG)) == [(200, "pf", wanted)] * 2

            both = asyncio.gather(ask(h, LONG), ask(r, LONG))
            await p.wait_transfers(2)
            first.kill()
            assert await both == [(200, "local", wanted), (502, None, "prefill_lost")]
            assert await local_prefills(h, "retry") == 1
            for client in (h, r):
                await client.wait_no_pages()
            assert (await ask(r, LONG))[::2] == (503, "unavailable")

            with nodes(prefill) as (first,):
                await until(lambda: first.text().count("session.up") == 2, "both are connected")
                both = asyncio.gather(ask(h, LONG), ask(r, LONG))
                await p.wait_transfers(2)
                first.send_signal(signal.SIGSTOP)
                began = time.monotonic()
                refused = await asyncio.wait_for(ask(r, LONG), LINK_LOST_S + MARGIN_S)
                assert await both == [(200, "local", wanted), (504, None, "stalled")]
                assert refused[0] in (503, 504)
                assert time.monotonic() - began < LINK_LOST_S + MARGIN_S
                for client in (h, r):
                    await client.wait_no_pages()
                first.send_signal(signal.SIGCONT)
                await until(lambda: first.text().count("session.up") == 4, "both are connected")
                assert await asyncio.gather(ask(h, LONG), ask(r, LONG)) == [(200, "pf", wanted)] * 2
                for client in (p, h, r):
                    await client.wait_no_pages()


async def test_two_prefills_share_and_stand_in(slow_model: Path, tmp_path: Path) -> None:
    prefills = [prefill_node(name, slow_model, tmp_path) for name in ("pf0", "pf1")]
    decode = decode_node("dc", "refuse", slow_model, tmp_path, *prefills)
    prompts = [random_prompt(400, seed=seed) for seed in range(6)]
    async with cluster(*prefills, decode) as (running, (*_, d)):
        for node in running[:2]:
            await until(lambda n=node: "session.up" in n.text(), "both prefills are connected")
        answers = await asyncio.gather(*(ask(d, prompt) for prompt in prompts))
        assert [status for status, _, _ in answers] == [200] * 6
        assert Counter(name for _, name, _ in answers) == {"pf0": 3, "pf1": 3}

        again = asyncio.gather(*(ask(d, prompt) for prompt in prompts))
        await Client(d.session, prefills[0]).wait_transfers(1)
        running[0].kill()
        assert await again == [(200, "pf1", tokens) for _, _, tokens in answers]
        for prompt, (_, _, tokens) in zip(prompts, answers, strict=True):
            assert await ask(d, prompt) == (200, "pf1", tokens)
        await d.wait_no_pages()
        served = [record.prefill for record in await requests(decode)]
        assert Counter(served)["pf0"] == 3
