"""Two neighbouring versions of the peer protocol: each half of a pair is upgraded on its own."""

from pathlib import Path

import pytest

from pdnode.core.wire import PROTOCOL_MAX, PROTOCOL_MIN
from tests.support.admin import admin_of
from tests.support.nodes import NodeSpec, cluster, nodes, requests, until
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.timeout(240)

PROMPT = random_prompt(100, seed=3)
BEFORE, NOW, NEXT = (PROTOCOL_MAX - 1, PROTOCOL_MAX), None, (PROTOCOL_MAX, PROTOCOL_MAX + 1)
TOO_NEW = (PROTOCOL_MAX + 1, PROTOCOL_MAX + 2)


async def test_nodes_are_upgraded_one_after_the_other(tiny_model: Path, tmp_path: Path) -> None:
    """A decode node of the version before, and its prefill node in all three; the same tokens."""
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path)
    decode = NodeSpec(
        "dc", "decode", tiny_model, tmp_path, (prefill,), peer={"reconnect_max_s": 0.3}
    )
    prefill.protocol, decode.protocol = BEFORE, BEFORE
    async with cluster(prefill, decode) as (running, (_, d)):
        wanted = await d.tokens(PROMPT, 4)
        assert running[0].stop() == 0
        for protocol in (NOW, NEXT):
            prefill.protocol = protocol
            with nodes(prefill) as (newer,):
                await d.wait_ready(running[1])
                assert await d.tokens(PROMPT, 4) == wanted
                assert (await requests(decode))[-1].prefill == "pf"
                async with admin_of(decode.admin) as admin:
                    [peer] = (await admin.snapshot()).peers
                    assert peer.protocol == PROTOCOL_MAX
                assert newer.stop() == 0
            await d.wait_ready(running[1], status=503)


async def test_versions_that_are_too_far_apart_are_refused_by_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path, protocol=TOO_NEW)
    decode = NodeSpec("dc", "decode", tiny_model, tmp_path, (prefill,))
    with nodes(prefill, decode) as running:
        said = (
            f"protocol: {PROTOCOL_MIN} to {PROTOCOL_MAX} here, {TOO_NEW[0]} to {TOO_NEW[1]} there"
        )
        await until(lambda: said in running[1].text(), "the decode node names the versions", 90)
