"""How nodes end: by a signal, with and without work, by force, and by the death of a process."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.support.admin import admin_of
from tests.support.nodes import (
    NodeSpec,
    alive,
    clients,
    cluster,
    nodes,
    requests,
    shared_memory,
    transfers,
    until,
)
from tests.support.prompts import random_prompt
from tests.support.streams import started_stream, tokens

LONG = random_prompt(2000, seed=1)
SHORT = random_prompt(20, seed=2)

pytestmark = pytest.mark.timeout(300)


def pair(model: Path, folder: Path, **fields: object) -> tuple[NodeSpec, NodeSpec]:
    """A prefill and a decode node that does nothing alone; chunks are small, so prompts take."""
    engine = {"chunk_tokens": 64}
    prefill = NodeSpec("pf", "prefill", model, folder, engine=engine, **fields)
    decode = NodeSpec(
        "dc", "decode", model, folder, (prefill,), engine=engine, peer={"reconnect_max_s": 0.5}
    )
    return prefill, decode


async def test_sigterm_finishes_what_was_accepted(slow_model: Path, tmp_path: Path) -> None:
    """Both nodes at once, with a stream running and a transfer in flight: nothing is cut off."""
    prefill, decode = pair(slow_model, tmp_path)
    async with cluster(prefill, decode) as (running, (p, d)):
        events, stream = await started_stream(d, SHORT, 150)
        long = asyncio.create_task(d.complete(LONG, 3))
        await p.wait_transfers(1)
        for node in running:
            node.send_signal(signal.SIGTERM)
        await until(lambda: "node.draining" in running[1].text(), "the decode node drains")
        status, body, headers = await d.post(SHORT, 1)
        assert (status, headers["Retry-After"]) == (503, "1"), body
        status, reasons = await d.ready()
        assert status == 503
        assert "draining" in reasons
        async with d.session.get(f"{d.spec.url}/health") as health:
            assert health.status == 200
        assert (await long)["usage"]["completion_tokens"] == 3
        await stream
        assert tokens(events) == 150
        assert [await node.ended() for node in running] == [0, 0]
    for node in running:
        assert "node.stopped" in node.text()
        assert not node.spec.admin.exists()


async def test_a_drain_that_takes_too_long_is_forced(slow_model: Path, tmp_path: Path) -> None:
    """By its own bound on the prefill node, by a second signal on the decode node: exit 143."""
    prefill, decode = pair(slow_model, tmp_path, node={"shutdown_timeout_s": 0.2})
    async with cluster(prefill, decode) as (running, (p, d)):
        long = asyncio.create_task(d.post(LONG, 3))
        await p.wait_transfers(1)
        running[0].send_signal(signal.SIGTERM)
        status, body, _ = await long
        assert (status, body["error"]["code"]) == (502, "prefill_lost"), body
        assert await running[0].ended() == 143
        await d.wait_no_pages()

    async with cluster(prefill, decode) as (running, (p, d)):
        events, stream = await started_stream(d, SHORT, 1500)
        long = asyncio.create_task(d.post(LONG, 3))
        await p.wait_transfers(1)
        running[1].send_signal(signal.SIGTERM)
        await until(lambda: "node.draining" in running[1].text(), "the decode node drains")
        running[1].send_signal(signal.SIGTERM)
        await stream
        assert tokens(events) < 1500
        assert events[-1]["error"]["code"] == "unavailable", events[-1]
        status, body, _ = await long
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert await running[1].ended() == 143
        await p.wait_no_pages()
        assert (await transfers(prefill))[-1].outcome in ("link_lost", "cancelled")


async def test_a_killed_worker_of_a_decode_node_is_replaced(
    slow_model: Path, tmp_path: Path
) -> None:
    """Its requests hear of it, readiness is false, another engine comes, and the peer takes it."""
    before = shared_memory()
    prefill, decode = pair(slow_model, tmp_path)
    async with cluster(prefill, decode) as (running, (p, d)):
        wanted = await d.tokens(SHORT, 8)
        async with admin_of(decode.admin) as admin:
            boot = (await admin.snapshot()).node.boot
            events, stream = await started_stream(d, SHORT, 1500)
            long = asyncio.create_task(d.post(LONG, 3))
            await p.wait_transfers(1)
            (worker,) = running[1].children()
            os.kill(worker, signal.SIGKILL)
            await stream
            assert "SIGKILL" in events[-1]["error"]["message"], events[-1]
            status, body, _ = await long
            assert status == 500, body
            assert "SIGKILL" in body["error"]["message"]
            lost = await admin.until(lambda one: not one.ready)
            assert "W105" in [one.code for one in lost.warnings], lost.warnings
            assert (await d.post(SHORT, 1))[0] == 503
            await d.wait_ready(running[1])
            after = (await admin.snapshot()).node
            assert after.boot != boot
        assert running[1].process.poll() is None
        assert not alive(worker)
        assert running[1].children() != [worker]
        assert await d.tokens(SHORT, 8) == wanted
        assert (await requests(decode))[-1].prefill == "pf"
        for client in (p, d):
            await client.wait_no_pages()
    assert shared_memory() == before


async def test_a_killed_worker_of_a_prefill_node_is_replaced(
    slow_model: Path, tmp_path: Path
) -> None:
    before = shared_memory()
    prefill, decode = pair(slow_model, tmp_path)
    async with cluster(prefill, decode) as (running, (p, d)):
        wanted = await d.tokens(SHORT, 8)
        long = asyncio.create_task(d.post(LONG, 3))
        await p.wait_transfers(1)
        (worker,) = running[0].children()
        os.kill(worker, signal.SIGKILL)
        status, body, _ = await long
        assert (status, body["error"]["code"]) == (502, "prefill_lost")
        assert "SIGKILL" in body["error"]["message"]
        await d.wait_no_pages()
        for client, node in ((p, running[0]), (d, running[1])):
            await client.wait_ready(node)
        assert await d.tokens(SHORT, 8) == wanted
        assert running[0].text().count("engine.died") == 1
        assert running[1].text().count("session.up") == 2
        await p.wait_no_pages()
    assert shared_memory() == before


async def test_a_node_whose_restarts_are_used_up_ends(tiny_model: Path, tmp_path: Path) -> None:
    """With one restart allowed the second death in a row is the end: exit 70, nothing is left."""
    before = shared_memory()
    node = NodeSpec("co", "colocated", tiny_model, tmp_path, engine={"max_restarts": 1})
    async with cluster(node) as ((running,), (client,)):
        (worker,) = running.children()
        os.kill(worker, signal.SIGKILL)
        await until(lambda: "engine.restarting" in running.text(), "another engine is started")
        await client.wait_ready(running)
        (worker,) = running.children()
        os.kill(worker, signal.SIGKILL)
        assert await running.ended() == 70
        assert not alive(worker)
        assert not node.admin.exists()
    assert shared_memory() == before


async def test_a_worker_that_stands_still_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    """It lives, and answers nothing: who waits for its tokens must not wait for ever."""
    node = NodeSpec("co", "colocated", tiny_model, tmp_path, engine={"stall_s": 2})
    async with cluster(node) as ((running,), (client,)):
        wanted = await client.tokens(SHORT, 8)
        (worker,) = running.children()
        os.kill(worker, signal.SIGSTOP)
        status, body, _ = await client.post(SHORT, 8)
        assert status == 500
        assert "no layer of a pass was done for 2 s" in body["error"]["message"]
        assert not alive(worker)
        await client.wait_ready(running)
        assert await client.tokens(SHORT, 8) == wanted
        assert running.text().count("engine.stalled") == 1
        await client.wait_no_pages()


async def test_peers_come_back(tiny_model: Path, tmp_path: Path) -> None:
    """kill -9 of either daemon: its worker dies too, the peer says so and serves it again."""
    before = shared_memory()
    prefill, decode = pair(tiny_model, tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        (p, d) = await stack.enter_async_context(clients(prefill, decode))
        (second,) = stack.enter_context(nodes(decode))  # decode first: it waits for its prefill
        await until(lambda: "node.serving" in second.text(), "the decode node has loaded")
        assert (await d.ready())[0] == 503
        (first,) = stack.enter_context(nodes(prefill))
        await d.wait_ready(second)
        wanted = await d.tokens(LONG, 8)

        (worker,) = first.children()
        first.kill()
        await until(lambda: not alive(worker), "the killed daemon's worker ends")
        await until(lambda: "session.lost" in second.text(), "the decode node says lost")
        await d.wait_ready(second, status=503)
        assert prefill.admin.exists()  # a socket file outlives kill -9; the next start replaces it
        (first,) = stack.enter_context(nodes(prefill))
        await d.wait_ready(second)
        assert await d.tokens(LONG, 8) == wanted

        (worker,) = second.children()
        second.kill()
        await until(lambda: not alive(worker), "the killed daemon's worker ends")
        (second,) = stack.enter_context(nodes(decode))
        await d.wait_ready(second)
        assert await d.tokens(LONG, 8) == wanted
        assert first.text().count("session.up") == 2
        assert len(await requests(decode)) == 1
        for client in (p, d):
            await client.wait_no_pages()
        assert first.stop() == 0
        assert second.stop() == 0
        assert shared_memory() == before
