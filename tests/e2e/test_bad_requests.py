"""Requests that cannot be served: 4xx in OpenAI's form, and nothing left behind on either node."""

import json

import aiohttp
import pytest

from tests.support.nodes import Client, RunningNode, clients, transfers
from tests.support.prompts import random_prompt
from tests.support.tiny_model import CONTEXT_TOKENS, VOCABULARY

CASES = {
    "empty prompt": ({"prompt": []}, 400, "prompt", ()),
    "empty text": ({"prompt": ""}, 400, "prompt", ()),
    "prompt too long": (
        {"prompt": random_prompt(3000, seed=1)},
        400,
        "prompt",
        ("3000", str(CONTEXT_TOKENS)),
    ),
    "prompt and max_tokens too long": (
        {"prompt": random_prompt(2000, seed=1), "max_tokens": 100},
        400,
        "max_tokens",
        ("2000", "100", str(CONTEXT_TOKENS)),
    ),
    "unknown model": ({"model": "gpt-4"}, 404, "model", ("gpt-4", "test-model")),
    "id beyond the vocabulary": (
        {"prompt": [5, VOCABULARY]},
        400,
        "prompt",
        (str(VOCABULARY), str(VOCABULARY - 1)),
    ),
    "negative id": ({"prompt": [5, -1]}, 400, "prompt", ("-1",)),
    "wrong type": ({"max_tokens": "many"}, 400, "max_tokens", ()),
    "out of range": ({"temperature": -1}, 400, "temperature", ("-1",)),
    "not built": ({"suffix": "x"}, 400, "suffix", ()),
}


async def refuse(client: Client, data: bytes) -> tuple[int, dict[str, object]]:
    """Status and error of a raw body, which must have OpenAI's form."""
    url = f"{client.spec.url}/v1/completions"
    headers = {"Content-Type": "application/json"}
    async with client.session.post(url, data=data, headers=headers) as answer:
        error = (await answer.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
        return answer.status, error


async def test_bad_requests_leave_nothing_behind(trio: list[RunningNode]) -> None:
    prefill, decode, _ = (node.spec for node in trio)
    async with clients(prefill, decode) as (p, d):
        await d.wait_ready(trio[1])
        before = len(await transfers(prefill))
        for name, (fields, wanted, param, words) in CASES.items():
            body = {"model": "test-model", "prompt": [5, 6, 7], "max_tokens": 2, **fields}
            status, error = await refuse(d, json.dumps(body).encode())
            assert (status, error["param"]) == (wanted, param), (name, error)
            assert all(word in error["message"] for word in words), (name, error)
        for data in (b"", b"{", b'{"model": ', b"[1, 2]", b"\xff\xfe", b"[" * 5000):
            status, error = await refuse(d, data)
            assert status == 400, (data[:20], error)
        status, body, _ = await p.post([5, 6, 7], 2)
        assert (status, body["error"]["code"]) == (404, "wrong_role")
        for client in (p, d):
            await client.wait_no_pages()
            assert (await client.metrics())["pdnode_kv_transfers_inflight"] == 0
        assert len(await transfers(prefill)) == before
        assert len(await d.tokens([5, 6, 7], 2)) == 2


@pytest.mark.parametrize("route", ["/v1/nothing", "/admin/v1/transfers", "/peer/v1/link"])
async def test_unknown_routes(trio: list[RunningNode], route: str) -> None:
    """The API listener knows neither the admin routes nor the peer link."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{trio[1].spec.url}{route}") as answer,
    ):
        assert answer.status == 404
        assert (await answer.json())["error"]["type"]
