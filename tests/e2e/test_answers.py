"""What a client reads is the same through prefill and decode as from one node that does both."""

import re

import pytest

from tests.support.nodes import Client, RunningNode, clients
from tests.support.prompts import random_prompt

PROMPT = random_prompt(150, seed=3)
CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Which animal says moo? " * 12},
]
BASE = {"model": "test-model", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
DRAWN = {**BASE, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 11}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CASES = {
    "plain": ("completions", {**BASE, "ignore_eos": True}),
    "one token of prompt": ("completions", {**BASE, "prompt": [77], "ignore_eos": True}),
    "text": ("completions", {**BASE, "prompt": "over there, in the inner garden " * 8}),
    "drawn": ("completions", {**DRAWN, "ignore_eos": True}),
    "drawn stream": ("completions", {**DRAWN, **STREAM, "ignore_eos": True}),
    "usage in every event": (
        "completions",
        {
            **BASE,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
        },
    ),
    "chat": ("chat/completions", {"messages": CHAT, **{k: BASE[k] for k in BASE if k != "prompt"}}),
    "chat stream": (
        "chat/completions",
        {"messages": CHAT, **STREAM, **{k: BASE[k] for k in BASE if k != "prompt"}},
    ),
}


async def raw(client: Client, route: str, body: dict[str, object]) -> tuple[str, str]:
    """Who computed the prompt, and the answer without what differs from call to call."""
    async with client.session.post(f"{client.spec.url}/v1/{route}", json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    text = re.sub(r'"id":"[^"]+"', '"id":""', text)
    return answer.headers["X-Pdnode-Prefill"], re.sub(r'"created":\d+', '"created":0', text)


async def same(nodes: list[Client], route: str, body: dict[str, object]) -> str:
    """Both nodes' answer."""
    decode, colocated = nodes
    name, text = await raw(decode, route, body)
    prompt = body.get("prompt")
    assert name == ("local" if prompt == [77] else "pf")
    assert await raw(colocated, route, body) == ("local", text)
    return text


@pytest.mark.parametrize("case", CASES)
async def test_equal_to_the_colocated_node(trio: list[RunningNode], case: str) -> None:
    route, body = CASES[case]
    async with clients(*(node.spec for node in trio[1:])) as found:
        for client, node in zip(found, trio[1:], strict=True):
            await client.wait_ready(node)
        text = await same(found, route, body)
        if body.get("stream"):
            assert text.endswith("data: [DONE]\n\n")
            assert '"choices":[],' in text
        assert '"usage":{"prompt_tokens":' in text
        for client in found:
            await client.wait_no_pages()


async def test_stop_strings_and_stop_tokens(trio: list[RunningNode]) -> None:
    """Taken from the plain answer, so that they are met: cut before, and not before min_tokens."""
    async with clients(*(node.spec for node in trio[1:])) as found:
        for client, node in zip(found, trio[1:], strict=True):
            await client.wait_ready(node)
        plain = await found[0].complete(PROMPT, 24, return_token_ids=True)
        text, ids = plain["choices"][0]["text"], plain["choices"][0]["token_ids"]
        stop = text[len(text) // 2 :][:2]
        body = {**BASE, "ignore_eos": True, "stop": [stop], "return_token_ids": True}
        cut = await same(found, "completions", body)
        assert '"finish_reason":"stop"' in cut
        status, answer, _ = await found[0].post(PROMPT, 24, stop=[stop])
        assert status == 200
        assert answer["choices"][0]["text"] == text[: text.index(stop)]

        body = {**BASE, "ignore_eos": True, "stop_token_ids": [ids[3]], "return_token_ids": True}
        first = ids.index(ids[3]) + 1
        assert f'"completion_tokens":{first}' in await same(found, "completions", body)
        late = await same(found, "completions", {**body, "min_tokens": 10})
        found_tokens = int(re.search(r'"completion_tokens":(\d+)', late)[1])
        assert found_tokens > 10 or '"finish_reason":"stop"' in late
        assert found_tokens >= 10
        await same(found, "completions", {**body, "min_tokens": 10, **STREAM})
        for client in found:
            await client.wait_no_pages()
