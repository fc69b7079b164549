"""Log probabilities, echo and several choices, over a scripted service."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from pdnode.core.request import Score, TokenEvent
from pdnode.errors import PrefillLost, QueueFull
from tests.support.fake_service import END, Bench, serve, tokens

COMPLETION: dict[str, object] = {"model": "tiny", "prompt": "hé"}
CHAT: dict[str, object] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
FIRST, SECOND = "é".encode()
ANSWER = [
    TokenEvent(ord("x"), -0.25, None, ((ord("x"), -0.25), (FIRST, -2.0))),
    TokenEvent(FIRST, -1.5, None, ((ord("y"), -0.5), (END, -1.0))),
    TokenEvent(SECOND, -0.125, None, ((SECOND, -0.125), (299, -3.0))),
    TokenEvent(END, -0.75, "stop", ((END, -0.75), (ord("z"), -1.0))),
]
TOKENS = ["x", "bytes:\\xc3", "bytes:\\xa9", "<|end|>"]
LOGPROBS = [-0.25, -1.5, -0.125, -0.75]
TOPS = [
    {"x": -0.25, "bytes:\\xc3": -2.0},
    {"y": -0.5, "<|end|>": -1.0, "bytes:\\xc3": -1.5},
    {"bytes:\\xa9": -0.125, "token_id:299": -3.0},
    {"<|end|>": -0.75, "z": -1.0},
]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with serve() as served:
        served.service.script = list(ANSWER)
        yield served


async def chunks(bench: Bench, path: str, body: dict[str, object]) -> list[dict[str, object]]:
    async with bench.client.post(bench.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        events = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [msgspec.json.decode(event.removeprefix("data: "), type=dict) for event in events[:-1]]


async def choices(bench: Bench, path: str, body: dict[str, object]) -> list[dict[str, object]]:
    status, _, answer = await bench.post(path, body)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer["choices"]


async def test_a_completion_has_one_entry_per_token(bench: Bench) -> None:
    (choice,) = await choices(bench, "/v1/completions", {**COMPLETION, "logprobs": 2})
    assert choice["text"] == "xé"
    wanted = {
        "text_offset": [0, 1, 1, 2],
        "token_logprobs": LOGPROBS,
        "tokens": TOKENS,
        "top_logprobs": TOPS,
    }
    assert choice["logprobs"] == wanted
    assert bench.service.requests[0].logprobs == 2
    streamed = await chunks(bench, "/v1/completions", {**COMPLETION, "logprobs": 2})
    assert len(streamed) == 4
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]  # type: ignore[index]
    for name, values in wanted.items():
        assert [part[name] for part in parts] == [[value] for value in values]


async def test_none_zero_and_absent_are_three_things(bench: Bench) -> None:
    (absent,) = await choices(bench, "/v1/completions", COMPLETION)
    assert absent["logprobs"] is None
    bench.service.script = [TokenEvent(65, -0.5, "length")]
    (zero,) = await choices(bench, "/v1/completions", {**COMPLETION, "logprobs": 0})
    assert zero["logprobs"]["top_logprobs"] == [{"A": -0.5}]
    (chat,) = await choices(bench, "/v1/chat/completions", {**CHAT, "logprobs": True})
    assert chat["logprobs"]["content"] == [
        {"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": []}
    ]
    assert [request.logprobs for request in bench.service.requests] == [0, 0, 0]


async def test_chat_gives_bytes(bench: Bench) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    (choice,) = await choices(bench, "/v1/chat/completions", body)
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert [entry["token"] for entry in content] == ["x", "\\xc3", "\\xa9", "<|end|>"]
    assert [entry["bytes"] for entry in content] == [[120], [FIRST], [SECOND], None]
    assert [entry["logprob"] for entry in content] == LOGPROBS
    assert content[1]["top_logprobs"] == [
        {"token": "y", "logprob": -0.5, "bytes": [121]},
        {"token": "<|end|>", "logprob": -1.0, "bytes": None},
    ]
    assert content[2]["top_logprobs"][1] == {
        "token": "token_id:299", "logprob": -3.0, "bytes": None,
    }  # fmt: skip
    streamed = await chunks(bench, "/v1/chat/completions", body)
    parts = [chunk["choices"][0]["logprobs"]["content"] for chunk in streamed]  # type: ignore[index]
    assert [part for (part,) in parts] == content


@pytest.mark.parametrize("prompt", ["hé", list("hé".encode())])
async def test_echo_shows_the_prompt_first(bench: Bench, prompt: object) -> None:
    body = {**COMPLETION, "prompt": prompt, "echo": True, "max_tokens": 4}
    (choice,) = await choices(bench, "/v1/completions", body)
    assert choice["text"] == "héxé"
    assert choice["logprobs"] is None
    assert not bench.service.requests[0].score_prompt
    streamed = await chunks(bench, "/v1/completions", body)
    texts = [chunk["choices"][0]["text"] for chunk in streamed]  # type: ignore[index]
    assert texts == ["héx", "", "é", ""]  # one chunk per token, the prompt before the first


async def test_echo_with_logprobs_has_entries_for_the_prompt(bench: Bench) -> None:
    scores = (Score(-4.0, ((FIRST, -4.0), (65, -5.0))), Score(-6.0, ((SECOND, -6.0), (66, -7.0))))
    bench.service.script = [ANSWER[0]._replace(prompt=scores), *ANSWER[1:]]
    body = {**COMPLETION, "echo": True, "logprobs": 2, "max_tokens": 4}
    (choice,) = await choices(bench, "/v1/completions", body)
    found = choice["logprobs"]
    assert found["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", *TOKENS]
    assert found["token_logprobs"] == [None, -4.0, -6.0, *LOGPROBS]
    assert found["text_offset"] == [0, 1, 1, 2, 3, 3, 4]
    assert found["top_logprobs"][:3] == [
        None,
        {"bytes:\\xc3": -4.0, "A": -5.0},
        {"bytes:\\xa9": -6.0, "B": -7.0},
    ]
    assert bench.service.requests[0].score_prompt


async def test_echo_alone_generates_nothing_to_be_seen(bench: Bench) -> None:
    scores = (Score(-4.0, ()), Score(-6.0, ()))
    bench.service.script = [TokenEvent(65, -0.5, "length", (), scores)]
    body = {**COMPLETION, "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    status, _, answer = await bench.post("/v1/completions", body)
    assert status == 200
    assert isinstance(answer, dict)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("hé", "length", [])
    assert choice["logprobs"]["token_logprobs"] == [None, -4.0, -6.0]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == 3
    assert bench.service.requests[0].max_tokens == 1
    (chunk,) = await chunks(bench, "/v1/completions", body)
    assert chunk["choices"][0]["text"] == "hé"  # type: ignore[index]
    status, _, answer = await bench.post("/v1/completions", {**COMPLETION, "max_tokens": 0})
    assert status == 400


async def test_control_tokens_written_out_keep_the_offsets_right(bench: Bench) -> None:
    bench.service.script = [TokenEvent(65, -0.5, "length", (), (Score(-1.0, ()), Score(-2.0, ())))]
    bench.codec.encode = lambda _text: [97, END, 98]  # type: ignore[method-assign]
    body = {**COMPLETION, "prompt": "a<|end|>b", "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = await choices(bench, "/v1/completions", body)
    assert choice["text"] == "a<|end|>bA"
    assert choice["logprobs"]["text_offset"] == [0, 1, 8, 9]


async def test_choices_are_generations_of_their_own(bench: Bench) -> None:
    bench.service.script = tokens("abc")
    body = {**COMPLETION, "n": 3, "best_of": 3, "seed": (1 << 63) - 2}
    status, headers, answer = await bench.post("/v1/completions", body)
    assert status == 200
    assert isinstance(answer, dict)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "abc"), (1, "abc"), (2, "abc"),
    ]  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == 3  # once
    assert answer["usage"]["completion_tokens"] == 9
    assert headers["X-Pdnode-Prefill"] == "pf-1"
    requests = bench.service.requests
    assert [request.seed for request in requests] == [(1 << 63) - 2, (1 << 63) - 1, 0]
    assert len({request.request_id for request in requests}) == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_streamed_choices_have_their_index(bench: Bench, path: str) -> None:
    bench.service.script = tokens("abc")
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**COMPLETION, **CHAT, "n": 2, "stream_options": options}
    found = await chunks(bench, path, body)
    assert len(found) == 7
    texts = {0: "", 1: ""}
    finishes = []
    roles = []
    for chunk in found[:-1]:
        (choice,) = chunk["choices"]  # type: ignore[misc]
        texts[choice["index"]] += choice.get("text") or choice["delta"]["content"]
        finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
        roles += [choice["index"]] if "role" in choice.get("delta", {}) else []
    assert texts == {0: "abc", 1: "abc"}
    assert finishes == ["length", "length"]
    assert sorted(roles) == ([0, 1] if "chat" in path else [])
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]  # type: ignore[index]
    assert counts == [1, 2, 3, 4, 5, 6, 6]


async def test_the_header_of_a_stream_names_who_has_begun(bench: Bench) -> None:
    """The second choice waits for its first token until the stream is open."""
    plain, held = bench.service.submit, asyncio.Event()

    async def submit(request):  # noqa: ANN001, ANN202
        generation = await plain(request)
        if len(bench.service.requests) == 2:
            generation.prefill = "pf-2"
            generation.script.insert(0, held)
        return generation

    bench.service.submit = submit  # type: ignore[method-assign]
    body = {**COMPLETION, "n": 2, "stream": True}
    async with bench.client.post(f"{bench.url}/v1/completions", json=body) as response:
        assert response.headers["X-Pdnode-Prefill"] == "pf-1"
        held.set()
        assert (await response.text()).endswith("data: [DONE]\n\n")
    bench.service.requests.clear()
    _, headers, _ = await bench.post("/v1/completions", {**COMPLETION, "n": 2})
    assert headers["X-Pdnode-Prefill"] == "pf-1, pf-2"


async def test_one_choice_that_fails_ends_all(bench: Bench) -> None:
    bench.service.script = [PrefillLost("pf-1 is gone")]
    status, _, _ = await bench.post("/v1/completions", {**COMPLETION, "n": 2})
    assert status == 502
    assert [one.cancels for one in bench.service.generations] == [["error"], ["error"]]


async def test_choices_admitted_before_a_refusal_are_cancelled(bench: Bench) -> None:
    held = asyncio.Event()
    bench.service.script = [held]
    plain = bench.service.submit

    async def submit(request):  # noqa: ANN001, ANN202
        if len(bench.service.requests) == 2:
            raise QueueFull("2 wait")
        return await plain(request)

    bench.service.submit = submit  # type: ignore[method-assign]
    status, headers, _ = await bench.post("/v1/completions", {**COMPLETION, "n": 3})
    assert (status, headers["Retry-After"]) == (429, "1")
    assert [one.cancels for one in bench.service.generations] == [["error"], ["error"]]


async def test_stop_strings_end_each_choice_by_itself(bench: Bench) -> None:
    bench.service.script = [*tokens("one.", None), *tokens("never")]
    found = await choices(bench, "/v1/completions", {**COMPLETION, "n": 2, "stop": "."})
    assert [(choice["text"], choice["finish_reason"]) for choice in found] == [("one", "stop")] * 2
    assert [one.cancels for one in bench.service.generations] == [["stop"], ["stop"]]
