"""Log probabilities, penalties, echo and choices through prefill + decode, and colocated, compared
with logits computed here by a dense forward pass in float32."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.support.local_engine import load_model
from tests.support.nodes import READY_TIMEOUT_S, Client, NodeSpec, clients, nodes
from tests.support.tiny_model import VOCABULARY

TOLERANCE = 2e-3
PEER_UP = 'pdnode_peer_up{peer="pf",role="prefill"}'
PROMPT = [(7 * n * n + 3 * n) % 250 + 5 for n in range(150)]
"""Ten pages and three chunks, the last token alone in the tenth page's first half."""


class DenseAttention:
    """Causal attention over one sequence that is there as a whole."""

    def run(
        self, _layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        group = queries.shape[1] // keys.shape[1]
        q = queries.transpose(0, 1)
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


class Reference:
    """Logits of the tiny model."""

    def __init__(self, path: Path) -> None:
        self._model = load_model(path)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocabulary]: of what follows each."""
        with torch.inference_mode():
            hidden = self._model.forward(
                torch.tensor(tokens), torch.arange(len(tokens)), DenseAttention(), lambda: None
            )
            return self._model.logits(hidden)

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        return torch.log_softmax(self.logits(tokens).double(), dim=1)


@contextlib.asynccontextmanager
async def cluster(model: Path, folder: Path) -> AsyncIterator[dict[str, Client]]:
    """A prefill node, one decode node of either policy, a colocated one. At the end none holds a
    page. Links outlast the stalls of a busy machine: a decode node alone would go on by itself."""
    engine, peer = {"chunk_tokens": 64}, {"link_lost_s": 60.0, "stall_s": 60.0}
    prefill = NodeSpec("pf", "prefill", model, folder, engine=engine, peer=peer)
    of_decode = {"engine": engine, "peer": peer}
    specs = [
        prefill,
        NodeSpec("decode", "decode", model, folder, (prefill,), policy="local", **of_decode),
        NodeSpec("strict", "decode", model, folder, (prefill,), **of_decode),
        NodeSpec("colocated", "colocated", model, folder, engine=engine),
    ]
    with nodes(*specs) as running:
        async with clients(*specs) as found:
            for client, node in zip(found, running, strict=True):
                await client.wait_ready(node)
            await wait_for_prefill(found[1])
            yield {client.spec.name: client for client in found}
            for client in found:
                await client.wait_no_pages()


async def wait_for_prefill(client: Client) -> None:
    """A decode node that may prefill by itself is ready before its peer is there."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while (await client.metrics()).get(PEER_UP) != 1:
            await asyncio.sleep(0.05)


async def ask(client: Client, max_tokens: int, **fields: object) -> tuple[list[dict], str]:
    """Choices, and who computed the prompt."""
    status, body, headers = await client.post(PROMPT, max_tokens, return_token_ids=True, **fields)
    assert status == 200, body
    return body["choices"], headers["X-Pdnode-Prefill"]  # type: ignore[return-value]


async def check_logprobs(client: Client, reference: Reference) -> None:
    """Of every generated token, the first one too, which no prefill node has seen."""
    (choice,), prefill = await ask(client, 12, logprobs=5)
    assert prefill == ("local" if client.spec.name == "colocated" else "pf")
    tokens, found = choice["token_ids"], choice["logprobs"]
    exact = reference.logprobs(PROMPT + tokens)[len(PROMPT) - 1 : -1]
    assert len(found["tokens"]) == len(tokens) == 12
    wanted = exact.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
    assert found["token_logprobs"] == pytest.approx(wanted, abs=TOLERANCE)
    for row, top in zip(exact, found["top_logprobs"], strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(
            row.topk(5).values.tolist(), abs=TOLERANCE
        )
    sampled, _ = await ask(client, 12, logprobs=0, temperature=1.5, seed=11)
    tokens = sampled[0]["token_ids"]
    exact = reference.logprobs(PROMPT + tokens)[len(PROMPT) - 1 : -1]
    wanted = exact.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
    assert sampled[0]["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=TOLERANCE)
    assert min(wanted) < -1  # not the greedy ones


def penalized(reference: Reference, count: int) -> list[int]:
    """Greedy tokens with the penalties of `check_penalties`, by their definitions."""
    answer: list[int] = []
    for _ in range(count):
        logits = reference.logits(PROMPT + answer)[-1].clone()
        for token in set(PROMPT + answer):
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in set(answer):
            logits[token] -= 0.7 + 0.4 * answer.count(token)
        logits[300] += 3.0
        answer.append(int(logits.argmax()))
    return answer


async def check_penalties(client: Client, wanted: list[int]) -> None:
    """`wanted`: by the reference. The repetition penalty counts a prompt that is not here."""
    (choice,), _ = await ask(
        client,
        len(wanted),
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias={"300": 3.0},
    )
    assert choice["token_ids"] == wanted
    (forced,), _ = await ask(client, 3, logit_bias={"17": 100})
    assert forced["token_ids"] == [17, 17, 17]


async def check_choices(client: Client) -> list[list[int]]:
    """Each choice is what its own seed gives alone; returns their tokens."""
    sampling = {"temperature": 1.0, "seed": 40}
    choices, _ = await ask(client, 10, n=3, **sampling)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    together = [choice["token_ids"] for choice in choices]
    assert len(set(map(tuple, together))) == 3
    alone = []
    for number in range(3):
        (choice,), _ = await ask(client, 10, **(sampling | {"seed": 40 + number}))
        alone.append(choice["token_ids"])
    assert together == alone
    return together


async def check_echo(client: Client, reference: Reference) -> None:
    """With log probabilities of the prompt, over chunk edges; computed here, and said so."""
    exact = reference.logprobs(PROMPT)
    targets = torch.tensor(PROMPT[1:]).unsqueeze(1)
    wanted = exact[:-1].gather(1, targets).squeeze(1).tolist()
    for max_tokens in (0, 2):
        (choice,), prefill = await ask(client, max_tokens, echo=True, logprobs=1)
        assert prefill == "local"
        found = choice["logprobs"]
        assert len(choice["token_ids"]) == max_tokens
        assert len(found["tokens"]) == len(PROMPT) + max_tokens
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        scored = found["token_logprobs"][1 : len(PROMPT)]
        assert scored == pytest.approx(wanted, abs=TOLERANCE)
        best = [max(top.values()) for top in found["top_logprobs"][1 : len(PROMPT)]]
        assert best == pytest.approx(exact[:-1].max(dim=1).values.tolist(), abs=TOLERANCE)
        offsets = found["text_offset"]
        assert offsets == sorted(offsets)
        for token, at in zip(found["tokens"], offsets, strict=True):
            assert token.startswith(("bytes:", "token_id:")) or choice["text"].startswith(token, at)


async def check_refusal(client: Client) -> None:
    """A node that must not compute prompts refuses, by name; echo and logprobs alone are fine."""
    status, body, _ = await client.post(PROMPT, 1, echo=True, logprobs=0)
    assert status == 400
    assert body["error"]["param"] == "echo"  # type: ignore[index]
    assert "when_no_prefill is refuse" in body["error"]["message"]  # type: ignore[index]
    _, prefill = await ask(client, 1, echo=True)
    assert prefill == "pf"
    (choice,), _ = await ask(client, 1, logprobs=0)
    assert len(choice["logprobs"]["token_logprobs"]) == 1


async def check_chat(client: Client) -> None:
    """Streamed choices: one chunk, one entry and one token each."""
    body = {
        "model": "test-model", "messages": [{"role": "user", "content": "hello"}], "n": 2,
        "max_tokens": 9, "logprobs": True, "top_logprobs": 3, "stream": True, "seed": 1,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with client.session.post(f"{client.spec.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        events = (await answer.text()).removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    decoded = [json_of(event) for event in events[:-1]]
    entries = {0: [], 1: []}
    for chunk in decoded[:-1]:
        (choice,) = chunk["choices"]
        (entry,) = choice["logprobs"]["content"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == sorted(
            (top["logprob"] for top in entry["top_logprobs"]), reverse=True
        )
        assert len(entry["top_logprobs"]) == 3
        entries[choice["index"]].append(entry)
    assert [len(found) for found in entries.values()] == [9, 9]
    assert decoded[-1]["usage"]["completion_tokens"] == 18


def json_of(event: str) -> dict:
    return json.loads(event.removeprefix("data: "))


@pytest.mark.timeout(400)
async def test_the_whole_api_on_three_kinds_of_nodes(tiny_model: Path, tmp_path: Path) -> None:
    reference = Reference(tiny_model)
    wanted = penalized(reference, 24)
    assert len(set(wanted)) > 5
    assert max(wanted) < VOCABULARY
    async with cluster(tiny_model, tmp_path) as found:
        decode, colocated = found["decode"], found["colocated"]
        for client in (decode, colocated):
            await check_logprobs(client, reference)
            await check_penalties(client, wanted)
            await check_echo(client, reference)
            await check_chat(client)
        split, whole = await asyncio.gather(check_choices(decode), check_choices(colocated))
        assert split == whole
        await check_refusal(found["strict"])
        metrics = await decode.metrics()
        assert metrics['pdnode_local_prefills_total{reason="scored_prompt"}'] == 2
