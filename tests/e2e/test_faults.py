"""A broken assertion anywhere in the daemon ends the node: nothing of its state can be trusted."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from pdnode.configfile import load_settings
from pdnode.daemon.node import Node
from pdnode.daemon.reload import ConfigSource
from pdnode.errors import Exit
from tests.support.nodes import Client, NodeSpec
from tests.support.prompts import random_prompt


async def test_a_broken_assertion_ends_the_node(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node runs in this process, so that a callback of its loop can be made to fail."""
    spec = NodeSpec("co", "colocated", tiny_model, tmp_path)
    path = tmp_path / "co.toml"
    path.write_text(spec.toml())
    loop = asyncio.get_running_loop()
    seen: list[dict[str, object]] = []
    monkeypatch.setattr(loop, "default_exception_handler", seen.append)
    loaded = load_settings(path)
    source = ConfigSource(lambda: load_settings(path), loaded)
    node = asyncio.create_task(Node(loaded.config, source).run())
    async with aiohttp.ClientSession() as session:
        client = Client(session, spec)
        async with asyncio.timeout(60):
            while not spec.admin.exists() or (await client.ready())[0] != 200:
                await asyncio.sleep(0.05)
        events = client.events(random_prompt(20, seed=1), 1900)
        await anext(events)

        def broken() -> None:
            raise AssertionError("page 7 is owned twice")

        loop.call_soon(broken)
        last = [event async for event in events][-1]
        assert last["error"]["message"] == "internal error: page 7 is owned twice"
        async with asyncio.timeout(20):
            assert await node == Exit.INTERNAL
    loop.set_exception_handler(None)
    assert [str(context["exception"]) for context in seen] == ["page 7 is owned twice"]
