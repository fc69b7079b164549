"""`[peer] verify` and canary pages: what is wrong in the memory is found, by page and layer.

The decode node runs in this process, so that its memory can be changed at a chosen moment; the
prefill node is a process of its own.
"""

import asyncio
import contextlib
import gc
import mmap
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdnode.configfile import load_settings
from pdnode.core.plan import PageSpan
from pdnode.core.transfer import Submit
from pdnode.daemon.node import Node
from pdnode.daemon.reload import ConfigSource
from pdnode.messenger.digests import PageMismatch, PageVerifier, PullDigests
from pdnode.messenger.push import PushMessenger
from tests.support.nodes import Client, NodeSpec, clients, nodes
from tests.support.prompts import random_prompt

PROMPT = random_prompt(200, seed=3)  # 199 tokens travel: 12 full pages and a part of the 13th
CANARIES = 4

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV region of a node's worker, mapped here as well."""

    node: Node

    def flip(self, page: int, layer: int) -> None:
        """One bit in the middle of a page of one layer."""
        engine = self.node._parts.engine
        assert engine is not None
        geometry, worker = engine.geometry, engine.groups[0].worker
        fd = worker.region_fds[0]
        with mmap.mmap(fd, os.fstat(fd).st_size) as mapped:
            at = layer * geometry.layer_stride + page * geometry.page_bytes
            mapped[at + geometry.page_bytes // 2] ^= 1


async def start(spec: NodeSpec, stack: contextlib.AsyncExitStack) -> Node:
    """A node in this process, on this loop."""
    path = spec.folder / f"{spec.name}.toml"
    path.write_text(spec.toml())
    loaded = load_settings(path)
    node = Node(loaded.config, ConfigSource(lambda: load_settings(path), loaded))
    running = asyncio.create_task(node.run())

    async def end() -> None:
        node._life.signalled()
        await running
        gc.collect()  # the core, before the end of the process

    stack.push_async_callback(end)
    while not spec.admin.exists():
        await asyncio.sleep(0.05)
    return node


@pytest.fixture
async def pair(tiny_model: Path, tmp_path: Path) -> AsyncIterator[tuple[Node, Client]]:
    """The decode node and a client of it; it has the prefill node."""
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path, engine={"chunk_tokens": 64})
    decode = NodeSpec(
        "dc", "decode", tiny_model, tmp_path, (prefill,),
        kv={"canary_pages": CANARIES}, peer={"verify": "twice"},
    )  # fmt: skip
    with nodes(prefill):
        async with contextlib.AsyncExitStack() as stack, clients(decode) as (client,):
            node = await start(decode, stack)
            async with asyncio.timeout(120):
                while (await client.ready())[0] != 200:
                    await asyncio.sleep(0.05)
            yield node, client


def counted(metrics: dict[str, float], what: str) -> dict[str, float]:
    """Of `pages_verified` or `mismatches`, by when."""
    start = f'pdnode_kv_{what}_total{{when="'
    return {
        name.removeprefix(start).removesuffix('"}'): value
        for name, value in metrics.items()
        if name.startswith(start)
    }


async def warning(client: Client, subject: str) -> str:
    """Text of the warning about this; empty if there is none."""
    async with client.session.get(f"{client.spec.url}/readyz") as answer:
        found = {(one["code"], *one["subjects"]): one["text"] for one in await answer.json()}
    return found.get(("E130", subject), "")


async def mismatches(client: Client, when: str) -> dict[str, float]:
    """Once there is one of this kind; without those that have found nothing."""
    async with asyncio.timeout(20):
        while not (found := counted(await client.metrics(), "mismatches")).get(when):
            await asyncio.sleep(0.02)
    return {when: count for when, count in found.items() if count}


async def test_what_changes_in_the_memory_is_found(
    pair: tuple[Node, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, client = pair
    await nothing_is_found_where_nothing_is_wrong(node, client)
    await a_page_changes_before_it_is_read(node, client, monkeypatch)
    await a_page_changes_while_it_is_read(node, client)
    await somebody_writes_to_a_canary(node, client)


async def nothing_is_found_where_nothing_is_wrong(node: Node, client: Client) -> None:
    wanted = await client.tokens(PROMPT, 20)
    assert await client.tokens(PROMPT, 20) == wanted
    await client.wait_no_pages()
    metrics = await client.metrics()
    pages = counted(metrics, "pages_verified")
    assert (pages["completion"], pages["release"]) == (26, 24)
    assert not any(counted(metrics, "mismatches").values())
    assert await warning(client, "pf") == ""
    pool = node._parts.engine.groups[0].gate.pool
    assert len(pool.withheld) == CANARIES
    assert pool.counts.free == node._parts.engine.geometry.pages - CANARIES


async def a_page_changes_before_it_is_read(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = PageVerifier.check

    def check(
        self: PageVerifier,
        digests: PullDigests,
        count: int,
        done: Callable[[PageMismatch | None], None],
    ) -> None:
        seen.append(digests.pages[5])
        Memory(node).flip(digests.pages[5], layer=2)
        real(self, digests, count, done)

    with monkeypatch.context() as patch:
        patch.setattr(PageVerifier, "check", check)
        status, body, _ = await client.post(PROMPT, 4)
    assert (status, body["error"]["code"]) == (500, "kv_corrupted")
    where = f"page {seen[0]} (number 5 of the prompt), layer 2, rank 0"
    assert where in body["error"]["message"]
    assert await mismatches(client, "completion") == {"completion": 1}
    assert where in await warning(client, "pf")
    await client.wait_no_pages()
    failures = 'pdnode_kv_transfer_failures_total{reason="corrupt"}'
    assert (await client.metrics())[failures] == 1
    await client.tokens(PROMPT, 4)  # the next one is right


async def a_page_changes_while_it_is_read(node: Node, client: Client) -> None:
    events = client.events(PROMPT, 1500)
    await anext(events)
    assert node._parts.pull is not None
    [pull] = node._parts.pull.open()
    first = pull.pages[0].start
    Memory(node).flip(first + 11, layer=3)
    Memory(node).flip(first + 12, layer=0)  # in the last page this node itself writes
    async for _ in events:
        pass
    assert await mismatches(client, "release") == {"completion": 1, "release": 1}
    text = await warning(client, "pf")
    assert text.startswith(f"from pf: page {first + 11} (number 11 of the prompt), layer 3, rank 0")
    assert "1 digests differ" in text
    await client.wait_no_pages()


async def somebody_writes_to_a_canary(node: Node, client: Client) -> None:
    page = node._parts.engine.groups[0].gate.pool.withheld[2]
    Memory(node).flip(page, layer=1)
    assert (await mismatches(client, "canary"))["canary"] == 1
    assert (await warning(client, "canary")).startswith(f"canary page {page}, layer 1 was")
    before = counted(await client.metrics(), "pages_verified")["canary"]
    async with asyncio.timeout(20):
        while counted(await client.metrics(), "pages_verified")["canary"] < before + 2 * CANARIES:
            await asyncio.sleep(0.1)
    assert counted(await client.metrics(), "mismatches")["canary"] == 1, "told once"


async def test_a_peer_that_mixes_up_two_pages(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault of the sender; its digests are those of the pages it meant to write."""

    def mixed(self: PushMessenger, work: object, effect: Submit) -> None:
        [program] = effect.programs
        [span] = program.spans
        swapped = (PageSpan(span.source + 1, span.destination, 1),
                   PageSpan(span.source, span.destination + 1, 1),
                   PageSpan(span.source + 2, span.destination + 2, span.count - 2))  # fmt: skip
        real(self, work, replace(effect, programs=(program._replace(spans=swapped),)))  # type: ignore[arg-type]

    real = PushMessenger._submit
    monkeypatch.setattr(PushMessenger, "_submit", mixed)
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path)
    decode = NodeSpec(
        "dc", "decode", tiny_model, tmp_path, (prefill,), policy="local", peer={"verify": "once"}
    )
    async with contextlib.AsyncExitStack() as stack:
        await start(prefill, stack)
        (running,) = stack.enter_context(nodes(decode))
        (client,) = await stack.enter_async_context(clients(decode))
        await client.wait_ready(running)
        answers = set()
        async with asyncio.timeout(60):
            while "kv_corrupted" not in answers:
                status, body, _ = await client.post(PROMPT, 4)
                answers.add(200 if status == 200 else body["error"]["code"])
        assert answers <= {200, "kv_corrupted"}
        assert "(number 0 of the prompt), layer 0" in body["error"]["message"]
        await client.wait_no_pages()
