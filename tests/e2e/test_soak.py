"""Many requests through one pair of nodes, one in a hundred cancelled: nothing piles up.

`make soak` runs the long form, 10,000 requests on the tiny model and 300 on SmolLM2
(`REQUESTS=…` and `SMOLLM2_REQUESTS=…` for other counts); else a short one on the tiny model.
"""

import asyncio
import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.admin import admin_of
from tests.support.census import census, descriptors, grown_bytes, settled
from tests.support.model import smollm2_dir
from tests.support.nodes import (
    PATIENT,
    Client,
    NodeSpec,
    RunningNode,
    clients,
    nodes,
    shared_memory,
)
from tests.support.prompts import random_prompt
from tests.support.reference import load_reference

TINY_REQUESTS = int(os.environ.get("PDNODE_SOAK_REQUESTS", "700"))
SMOLLM2_REQUESTS = int(os.environ.get("PDNODE_SOAK_SMOLLM2_REQUESTS", "0"))
SETTLING = 500  # requests after which pools, caches and the heap have their size
STREAMS = 16
CANCELLED_OF = 100  # one request of so many is cancelled
MOST_GROWTH_BYTES = 20 << 20
SEED = 5
REPORT_S = 60.0

pytestmark = pytest.mark.timeout(4 * 3600)

Case = tuple[list[int], list[int]]
"""A prompt, and the greedy tokens that follow it."""


class Soak:
    """Requests to the decode node of a pair, in several streams at a time."""

    def __init__(self, running: list[RunningNode], cases: list[Case]) -> None:
        self.prefill, self.decode = running
        self.cases = cases
        self.outcomes: Counter[str] = Counter()
        self._begun = time.monotonic()
        self._said = self._begun

    async def run(self, numbers: range) -> None:
        """Answers them all, then waits until both nodes are idle and no connection is left."""
        left: Iterator[int] = iter(numbers)
        async with clients(self.prefill.spec, self.decode.spec) as (p, d):
            async with asyncio.TaskGroup() as group:
                for _ in range(STREAMS):
                    group.create_task(self._stream(d, left))
            for client in (p, d):
                await client.wait_no_pages()

    async def _stream(self, client: Client, numbers: Iterator[int]) -> None:
        for number in numbers:
            prompt, wanted = self.cases[number % len(self.cases)]
            if number % CANCELLED_OF == CANCELLED_OF // 2:
                await self._cancelled(client, prompt, number)
            else:
                assert await client.tokens(prompt, len(wanted)) == wanted, (number, len(prompt))
                self.outcomes["answered"] += 1
            if time.monotonic() - self._said > REPORT_S:
                self._said = time.monotonic()
                self.say(number)

    async def _cancelled(self, client: Client, prompt: list[int], number: int) -> None:
        """By the administrator, or by leaving: after a time, or after some tokens."""
        draw = random.Random(number)
        way = ("admin", "time", "tokens")[number // CANCELLED_OF % 3]
        self.outcomes[f"cancelled: {way}"] += 1
        many = 400
        if way == "admin":
            name = f"soak-{number}"
            headers = {"x-request-id": name}
            url = f"{client.spec.url}/v1/completions"
            body = {"model": "test-model", "prompt": prompt, "max_tokens": many, "stream": True}
            body |= {"ignore_eos": True}
            async with client.session.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.content.readline()
                async with admin_of(client.spec.admin) as admin:
                    assert (await admin.post("cancel", {"request_id": name})).done
                assert b'"error"' in await answer.content.read()
        elif way == "time":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(draw.uniform(0.0, 0.5)):
                    await client.complete(prompt, many)
        else:
            async with contextlib.aclosing(client.events(prompt, many)) as events:
                for _ in range(draw.randrange(1, 20)):
                    await anext(events)

    def say(self, number: int) -> None:
        found = ", ".join(
            f"{name} {one.resident_bytes / (1 << 20):.1f} MiB {one.descriptors} fds"
            for name, one in census(self.prefill, self.decode).items()
        )
        sys.stdout.write(f"{number} requests, {time.monotonic() - self._begun:.0f} s: {found}\n")
        sys.stdout.flush()


def own_shared_memory() -> set[str]:
    """Without the semaphores of Python's process pools, of a simulator that runs beside it."""
    return {name for name in shared_memory() if not name.startswith("sem.mp-")}


@contextlib.asynccontextmanager
async def ready(running: list[RunningNode]) -> AsyncIterator[Client]:
    """A client of the decode node once all can serve; at the end it leaves no connection."""
    async with clients(*(node.spec for node in running)) as found:
        for client, node in zip(found, running, strict=True):
            await client.wait_ready(node)
        yield found[-1]


async def soak(running: list[RunningNode], cases: list[Case], requests: int, settling: int) -> None:
    work = Soak(running, cases)
    await work.run(range(settling))
    before, files = await settled(*running), own_shared_memory()
    work.say(settling)
    await work.run(range(settling, requests))
    after = await settled(*running)
    work.say(requests)
    grown = grown_bytes(before, after)
    shown = {name: f"{size / (1 << 20):+.1f} MiB" for name, size in grown.items()}
    sys.stdout.write(f"{dict(work.outcomes)}, after the first {settling}: {shown}\n")
    assert sum(work.outcomes.values()) == requests
    assert descriptors(after) == descriptors(before)
    assert max(grown.values()) <= MOST_GROWTH_BYTES
    assert own_shared_memory() == files
    assert [node.stop() for node in running] == [0, 0]


def pair(model: Path, folder: Path, **kv: object) -> tuple[NodeSpec, NodeSpec]:
    node = {"log_level": "info"}
    prefill = NodeSpec("pf", "prefill", model, folder, kv=kv, node=node, peer=PATIENT)
    return prefill, NodeSpec(
        "dc", "decode", model, folder, (prefill,), kv=kv, node=node, peer=PATIENT
    )


async def test_soak_tiny(tiny_model: Path, tmp_path: Path) -> None:
    """The tokens of the first answer to a prompt are those of every later one."""
    draw = random.Random(SEED)
    sizes = [1, 2, 15, 16, 17, 18, *(draw.randrange(2, 700) for _ in range(34))]
    specs = pair(tiny_model, tmp_path, pool_bytes="16MiB")
    with nodes(*specs) as running:
        cases = []
        async with ready(running) as client:
            for number, size in enumerate(sizes):
                prompt = random_prompt(size, seed=number)
                cases.append((prompt, await client.tokens(prompt, draw.randrange(1, 24))))
        await soak(running, cases, TINY_REQUESTS, min(SETTLING, TINY_REQUESTS // 2))


@pytest.mark.skipif(not SMOLLM2_REQUESTS, reason="PDNODE_SOAK_SMOLLM2_REQUESTS is not set")
async def test_soak_smollm2(tmp_path: Path) -> None:
    """The tokens are those of the reference."""
    cases = [(case.prompt, case.tokens[:16]) for case in load_reference().prompts]
    with nodes(*pair(smollm2_dir(), tmp_path, pool_bytes="96MiB")) as running:
        async with ready(running):
            pass
        await soak(running, cases, SMOLLM2_REQUESTS, SMOLLM2_REQUESTS // 3)
