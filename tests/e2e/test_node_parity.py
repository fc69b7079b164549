"""The same tokens through prefill and decode, through a colocated node, and from transformers.

float32, greedy, SmolLM2. The prompts' reference keeps a logit gap of at least 0.01 on every token,
so any difference is a fault. `make parity` runs the whole set of 64 prompts x 64 tokens.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from tests.support.model import smollm2_dir
from tests.support.nodes import Client, NodeSpec, clients, nodes
from tests.support.reference import Case, load_reference

FULL = os.environ.get("PDNODE_PARITY") == "full"
SET_PROMPTS, SET_TOKENS = (64, 64) if FULL else (16, 32)
GRID_TOKENS = 32
CHUNK_SIZES = {64: (1, 2, 15, 16, 17, 63, 64, 65, 197), 512: (511, 512, 513, 1500, 1541)}
RDM_SIZES = (2, 17, 65, 197)

pytestmark = pytest.mark.timeout(3600 if FULL else 900)


@contextlib.asynccontextmanager
async def trio(folder: Path, chunk: int, provider: str = "tcp") -> AsyncIterator[list[Client]]:
    """A prefill, a decode (never local) and a colocated node; at the end none holds a page."""
    model = smollm2_dir()
    engine = {"chunk_tokens": chunk}
    prefill = NodeSpec("pf", "prefill", model, folder, engine=engine, provider=provider)
    decode = NodeSpec("dc", "decode", model, folder, (prefill,), engine=engine, provider=provider)
    colocated = NodeSpec("co", "colocated", model, folder, engine=engine)
    specs = (prefill, decode, colocated)
    with nodes(*specs) as running:
        async with clients(*specs) as found:
            for client, node in zip(found, running, strict=True):
                await client.wait_ready(node)
            yield found
            for client in found:
                await client.wait_no_pages()


async def check(client: Client, case: Case, max_tokens: int) -> None:
    """The node's tokens are the reference's, and they came by the way that they should."""
    status, body, headers = await client.post(case.prompt, max_tokens, return_token_ids=True)
    assert status == 200, body
    choice = body["choices"][0]
    assert choice["token_ids"] == case.tokens[:max_tokens], len(case.prompt)
    assert body["usage"]["prompt_tokens"] == len(case.prompt)
    remote = client.spec.role == "decode" and len(case.prompt) > 1
    assert headers["X-Pdnode-Prefill"] == ("pf" if remote else "local")


async def check_all(client: Client, cases: Iterable[tuple[Case, int]]) -> None:
    """`check` of every (case, tokens), eight requests at once."""
    gate = asyncio.Semaphore(8)

    async def one(case: Case, tokens: int) -> None:
        async with gate:
            await check(client, case, tokens)

    async with asyncio.TaskGroup() as group:
        for case, tokens in cases:
            group.create_task(one(case, tokens))


@pytest.mark.parametrize("chunk", sorted(CHUNK_SIZES))
async def test_parity_grid(tmp_path: Path, chunk: int) -> None:
    """Every interesting prompt length, one token and 32."""
    grid = load_reference().grid
    cases = [(grid[size], tokens) for size in CHUNK_SIZES[chunk] for tokens in (1, GRID_TOKENS)]
    async with trio(tmp_path, chunk) as (_, decode, colocated):
        await check_all(decode, cases)
        await check_all(colocated, cases)


async def test_parity_set(tmp_path: Path) -> None:
    """Many prompts of mixed length."""
    cases = load_reference().prompts[:SET_PROMPTS]
    assert len(cases) == SET_PROMPTS
    async with trio(tmp_path, 64) as (_, decode, _):
        await check_all(decode, [(case, SET_TOKENS) for case in cases])


async def test_parity_on_rdm_endpoints(tmp_path: Path) -> None:
    """The second kind of endpoint (as EFA's) gives the same tokens."""
    grid = load_reference().grid
    async with trio(tmp_path, 64, "tcp-rdm") as (_, decode, _):
        await check_all(decode, [(grid[size], GRID_TOKENS) for size in RDM_SIZES])
