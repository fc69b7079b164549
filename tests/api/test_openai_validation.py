"""Every field of the generation routes: what is refused, with which status, param and words."""

from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest

from tests.support.fake_service import CAPACITY, CONTEXT, END, Bench, serve, tokens

COMPLETION: Mapping[str, object] = {"model": "tiny", "prompt": "hi"}
CHAT: Mapping[str, object] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with serve() as served:
        yield served


def message(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


# field(s), param named, parts of the message; status 400
COMMON = [
    ({"model": 7}, "model", ["a string", "an integer"]),
    ({"model": None}, "model", ["needed"]),
    ({"model": ""}, "model", ["needed"]),
    ({"max_tokens": 0}, "max_tokens", ["0 is out of range", "1 to"]),
    ({"max_tokens": -3}, "max_tokens", ["-3", "1 to"]),
    ({"max_tokens": True}, "max_tokens", ["an integer", "a boolean"]),
    ({"max_tokens": 1.0}, "max_tokens", ["an integer", "a number"]),
    ({"max_tokens": "5"}, "max_tokens", ["an integer", "a string"]),
    ({"max_tokens": 10**30}, "max_tokens", ["out of range"]),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ["1 to"]),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", ["3", "4", "one of them"]),
    ({"max_tokens": CONTEXT}, "max_tokens", ["are needed", f"{CONTEXT} are available"]),
    ({"min_tokens": -1}, "min_tokens", ["-1", "0 to"]),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", ["9", "8"]),
    ({"min_tokens": CONTEXT + 1}, "min_tokens", [str(CONTEXT + 1)]),
    ({"temperature": 2.5}, "temperature", ["2.5", "0 to 2"]),
    ({"temperature": -0.1}, "temperature", ["-0.1", "0 to 2"]),
    ({"temperature": True}, "temperature", ["a number", "a boolean"]),
    ({"temperature": "hot"}, "temperature", ["a number", "a string"]),
    ({"top_p": 0}, "top_p", ["above 0, at most 1"]),
    ({"top_p": 1.01}, "top_p", ["1.01"]),
    ({"top_k": -2}, "top_k", ["-2", "-1 to"]),
    ({"top_k": 1.5}, "top_k", ["an integer"]),
    ({"seed": 1 << 63}, "seed", ["out of range"]),
    ({"seed": "x"}, "seed", ["an integer"]),
    ({"stop": ""}, "stop", ["0 characters", "1 to 256"]),
    ({"stop": ["a", ""]}, "stop", ["0 characters"]),
    ({"stop": ["a"] * 5}, "stop", ["5 strings", "at most 4"]),
    ({"stop": 3}, "stop", ["a string or a list of strings", "an integer"]),
    ({"stop": ["a", 3]}, "stop", ["a string or a list of strings"]),
    ({"stop": "x" * 257}, "stop", ["257", "256"]),
    ({"stop_token_ids": [300]}, "stop_token_ids", ["300", "0 to 299"]),
    ({"stop_token_ids": [-1]}, "stop_token_ids", ["-1"]),
    ({"stop_token_ids": 5}, "stop_token_ids", ["a list"]),
    ({"stop_token_ids": [True]}, "stop_token_ids", ["a list of integers", "a boolean"]),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", ["65", "at most 64"]),
    ({"ignore_eos": 1}, "ignore_eos", ["a boolean", "an integer"]),
    ({"stream": "yes"}, "stream", ["a boolean", "a string"]),
    ({"stream_options": {"include_usage": True}}, "stream_options", ["stream = true"]),
    ({"stream": True, "stream_options": True}, "stream_options", ["an object"]),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        ["a boolean"],
    ),
    ({"n": 0}, "n", ["0 is out of range", "1 to 8"]),
    ({"n": 9}, "n", ["9 is out of range", "1 to 8"]),
    ({"n": True}, "n", ["an integer", "a boolean"]),
    ({"best_of": 2}, "best_of", ["2 is not supported", "allowed: 1"]),
    ({"n": 2, "best_of": 3}, "best_of", ["3 is not supported", "allowed: 2"]),
    ({"use_beam_search": True}, "use_beam_search", ["true is not supported"]),
    ({"presence_penalty": 2.5}, "presence_penalty", ["2.5", "-2 to 2"]),
    ({"frequency_penalty": -2.1}, "frequency_penalty", ["-2.1", "-2 to 2"]),
    ({"frequency_penalty": "1"}, "frequency_penalty", ["a number", "a string"]),
    ({"repetition_penalty": 0}, "repetition_penalty", ["0 is out", "above 0, at most 10"]),
    ({"repetition_penalty": 11}, "repetition_penalty", ["11", "at most 10"]),
    ({"length_penalty": 2}, "length_penalty", ["2"]),
    ({"min_p": 0.1}, "min_p", ["0.1"]),
    ({"logit_bias": [5]}, "logit_bias", ["an object", "a list"]),
    ({"logit_bias": {"x": 1}}, "logit_bias", ["'x' is no token id", "0 to 299"]),
    ({"logit_bias": {"300": 1}}, "logit_bias", ["'300'", "0 to 299"]),
    ({"logit_bias": {"-1": 1}}, "logit_bias", ["'-1'", "0 to 299"]),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", ["'05'", "each once"]),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", ["101", "-100 to 100"]),
    ({"logit_bias": {"5": "a"}}, "logit_bias.5", ["a number", "a string"]),
    ({"logit_bias": {str(n): 0 for n in range(1025)}}, "logit_bias", ["1025", "at most 1024"]),
    ({"bad_words": ["x"]}, "bad_words", ["not supported"]),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", ["not supported", "nothing"]),
    ({"logprobs": "yes"}, "logprobs", ["is expected", "a string"]),
    ({"top_logprobs": 2}, "top_logprobs", ["allowed"]),
    ({"prompt_logprobs": 1}, "prompt_logprobs", ["1"]),
    ({"suffix": "end"}, "suffix", ['"end"']),
    ({"response_format": {"type": "json_object"}}, "response_format", ["json_object", "text"]),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", ["not supported"]),
    ({"guided_json": {}}, "guided_json", ["not supported"]),
    ({"guided_regex": "a"}, "guided_regex", ["not supported"]),
    ({"guided_choice": ["a"]}, "guided_choice", ["not supported"]),
    ({"guided_grammar": "a"}, "guided_grammar", ["not supported"]),
    ({"tools": [{"type": "function"}]}, "tools", ["not supported"]),
    ({"tool_choice": "required"}, "tool_choice", ["required", "none", "auto"]),
    ({"functions": [{}]}, "functions", ["not supported"]),
    ({"function_call": {"name": "f"}}, "function_call", ["not supported"]),
    ({"modalities": ["audio"]}, "modalities", ["audio"]),
    ({"audio": {}}, "audio", ["not supported"]),
    ({"chat_template": "x"}, "chat_template", ["not supported"]),
    ({"continue_final_message": True}, "continue_final_message", ["not supported"]),
    ({"add_generation_prompt": False}, "add_generation_prompt", ["not supported"]),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", ["not supported"]),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", ["not supported"]),
    ({"skip_special_tokens": False}, "skip_special_tokens", ["false is not supported"]),
]
COMPLETION_ONLY: list[tuple[dict[str, object], str, list[str]]] = [
    ({"logprobs": True}, "logprobs", ["an integer", "a boolean"]),
    ({"logprobs": 21}, "logprobs", ["21", "0 to 20"]),
    ({"logprobs": -1}, "logprobs", ["-1", "0 to 20"]),
    ({"echo": 1}, "echo", ["a boolean", "an integer"]),
    ({"echo": True, "max_tokens": -1}, "max_tokens", ["-1", "0 to"]),
    ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens", ["1", "0"]),
]
CHAT_ONLY: list[tuple[dict[str, object], str, list[str]]] = [
    ({"logprobs": 1}, "logprobs", ["a boolean", "an integer"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "0 to 20"]),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs", ["logprobs = true"]),
    ({"echo": True}, "echo", ["true is not supported"]),
]
PROMPTS: list[tuple[dict[str, object], list[str]]] = [
    ({"prompt": None}, ["needed"]),
    ({"prompt": ""}, ["empty", "at least 1 token"]),
    ({"prompt": []}, ["empty"]),
    ({"prompt": [""]}, ["empty"]),
    ({"prompt": [[]]}, ["empty"]),
    ({"prompt": 5}, ["a string or a list of token ids", "an integer"]),
    ({"prompt": ["a", "b"]}, ["2 prompts", "allowed: 1"]),
    ({"prompt": [[1], [2], [3]]}, ["3 prompts", "allowed: 1"]),
    ({"prompt": [1, "a"]}, ["a list of integers", "a string"]),
    ({"prompt": [1, True]}, ["a list of integers", "a boolean"]),
    ({"prompt": [[1, 2.0]]}, ["a list of integers", "a number"]),
    ({"prompt": [1, 300]}, ["300", "0 to 299"]),
    ({"prompt": [-1]}, ["-1", "vocabulary"]),
    ({"prompt": [1 << 70]}, ["vocabulary"]),
    ({"prompt": "x" * CONTEXT}, [f"{CONTEXT} tokens", f"holds {CONTEXT}"]),
    ({"prompt": [7] * 1000}, ["1000 tokens", f"holds {CONTEXT}"]),
    ({"prompt": "x" * (CONTEXT * 64 + 1)}, [str(CONTEXT * 64 + 1), str(CONTEXT * 64)]),
]
MESSAGES: list[tuple[dict[str, object], str, list[str]]] = [
    ({"messages": None}, "messages", ["at least 1"]),
    ({"messages": []}, "messages", ["at least 1"]),
    ({"messages": "hi"}, "messages", ["a list", "a string"]),
    ({"messages": ["hi"]}, "messages[0]", ["an object", "a string"]),
    (message(role="robot"), "messages[0].role", ["system", "assistant", "robot"]),
    (message(role=None), "messages[0].role", ["one of"]),
    (message(role="tool"), "messages[0].role", ["tool"]),
    (message(content=None), "messages[0].content", ["a string or a list", "null"]),
    (message(content=5), "messages[0].content", ["a string or a list", "an integer"]),
    (message(content=[]), "messages[0].content", ["0 parts"]),
    (message(content=["x"]), "messages[0].content[0]", ["an object"]),
    (
        message(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[0].type",
        ['"text"'],
    ),
    (message(content=[{"type": "text"}]), "messages[0].content[0].text", ["needed"]),
    (message(tool_calls=[{}]), "messages[0].tool_calls", ["not supported"]),
    (message(content="refuse me"), "messages", ["the template refuses"]),
    (message(content="x" * CONTEXT), "messages", ["tokens", str(CONTEXT)]),
]


async def check_refused(
    bench: Bench, path: str, body: object, param: str, parts: list[str]
) -> None:
    status, headers, answer = await bench.post(path, body)
    assert status == 400
    assert isinstance(answer, dict)
    assert answer.keys() == {"error"}
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    for part in parts:
        assert part in error["message"]
    assert headers["x-request-id"]
    assert bench.service.requests == []  # nothing was admitted


@pytest.mark.parametrize(("fields", "param", "parts"), COMMON, ids=lambda value: str(value)[:40])
async def test_common_fields_are_refused_by_name(
    bench: Bench, fields: dict[str, object], param: str, parts: list[str]
) -> None:
    await check_refused(bench, "/v1/completions", {**COMPLETION, **fields}, param, parts)
    await check_refused(bench, "/v1/chat/completions", {**CHAT, **fields}, param, parts)


async def test_fields_of_one_route_are_refused_by_name(bench: Bench) -> None:
    for fields, param, parts in COMPLETION_ONLY:
        await check_refused(bench, "/v1/completions", {**COMPLETION, **fields}, param, parts)
    for fields, param, parts in CHAT_ONLY:
        await check_refused(bench, "/v1/chat/completions", {**CHAT, **fields}, param, parts)


async def test_prompts_are_refused_by_name(bench: Bench) -> None:
    for fields, parts in PROMPTS:
        await check_refused(bench, "/v1/completions", {**COMPLETION, **fields}, "prompt", parts)


async def test_messages_are_refused_by_name(bench: Bench) -> None:
    for fields, param, parts in MESSAGES:
        await check_refused(bench, "/v1/chat/completions", {**CHAT, **fields}, param, parts)


async def test_neutral_values_nulls_and_unknown_fields_pass(bench: Bench) -> None:
    neutral = {
        "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "logit_bias": {}, "logprobs": None, "echo": False,
        "suffix": None, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
        "stop": None, "seed": None, "temperature": None, "max_tokens": None, "stream": None,
        "stream_options": None, "user": "me", "ignore_eos": None, "top_k": -1,
    }  # fmt: skip
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        status, _, _ = await bench.post(path, {**body, **neutral, "wat": 1, "why": {"a": []}})
        assert status == 200
    shown = bench.metrics.render("")[0].decode()
    assert 'pdnode_http_unknown_fields_total{route="completions"} 2.0' in shown
    assert 'pdnode_http_unknown_fields_total{route="chat"} 2.0' in shown
    first = bench.service.requests[0]
    assert (first.temperature, first.top_k, first.top_p, first.min_tokens) == (1.0, 0, 1.0, 0)
    assert first.seed != bench.service.requests[1].seed


async def test_all_fields_reach_the_request(bench: Bench) -> None:
    fields = {
        "max_tokens": 9, "min_tokens": 3, "temperature": 0, "top_p": 0.5, "top_k": 40,
        "seed": 12345, "stop_token_ids": [5, 6], "logit_bias": {"7": -100, "8": 2.5},
        "presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.25,
    }  # fmt: skip
    await bench.post("/v1/completions", {**COMPLETION, **fields})
    request = bench.service.requests[0]
    assert request.prompt == tuple(b"hi")
    assert (request.max_tokens, request.min_tokens, request.seed) == (9, 3, 12345)
    assert (request.temperature, request.top_p, request.top_k) == (0.0, 0.5, 40)
    assert request.stop_tokens == {5, 6, END}
    assert request.logit_bias == ((7, -100.0), (8, 2.5))
    assert (request.presence_penalty, request.frequency_penalty) == (-2.0, 0.5)
    assert request.repetition_penalty == 1.25
    await bench.post("/v1/completions", {**COMPLETION, **fields, "ignore_eos": True, "seed": -1})
    assert bench.service.requests[1].stop_tokens == {5, 6}
    assert bench.service.requests[1].seed == (1 << 63) - 1


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
async def test_four_shapes_of_a_prompt(bench: Bench, prompt: object) -> None:
    status, _, _ = await bench.post("/v1/completions", {**COMPLETION, "prompt": prompt})
    assert status == 200
    assert bench.service.requests[0].prompt == (97, 98)


async def test_chat_messages_reach_the_template(bench: Bench) -> None:
    messages = [
        {"role": "developer", "content": "be brief", "name": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "tool_calls": None},
    ]
    status, _, _ = await bench.post("/v1/chat/completions", {**CHAT, "messages": messages})
    assert status == 200
    assert bench.codec.chats == [
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": ""},
        ]
    ]


async def test_default_of_max_tokens(bench: Bench) -> None:
    await bench.post("/v1/completions", COMPLETION)
    await bench.post("/v1/completions", {**COMPLETION, "prompt": "x" * (CONTEXT - 5)})
    await bench.post("/v1/chat/completions", CHAT)
    await bench.post("/v1/chat/completions", {**CHAT, "max_completion_tokens": 4})
    rendered = len("user:hi\n")
    asked = [request.max_tokens for request in bench.service.requests]
    assert asked == [16, 5, CONTEXT - rendered, 4]


async def test_lengths_at_the_edge(bench: Bench) -> None:
    """Prompt + max_tokens = context passes, one more does not; the pool may be the smaller one."""
    body = {**COMPLETION, "prompt": [1] * 100}
    assert (await bench.post("/v1/completions", {**body, "max_tokens": CONTEXT - 100}))[0] == 200
    status, _, answer = await bench.post("/v1/completions", {**body, "max_tokens": CONTEXT - 99})
    assert status == 400
    assert isinstance(answer, dict)
    assert answer["error"]["code"] == "context_length_exceeded"
    bench.service.context_tokens = CAPACITY * 2
    status, _, answer = await bench.post("/v1/completions", {**body, "max_tokens": CAPACITY})
    assert status == 400
    assert isinstance(answer, dict)
    assert f"{CAPACITY + 100} tokens are needed" in answer["error"]["message"]
    assert f"{CAPACITY} are available in the KV cache" in answer["error"]["message"]


async def test_unknown_model_and_wrong_role(bench: Bench) -> None:
    status, _, answer = await bench.post("/v1/completions", {**COMPLETION, "model": "gpt"})
    assert status == 404
    assert answer == {
        "error": {
            "message": "model: 'gpt' is not served here; allowed: 'tiny'",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    bench.service.generates = False
    status, _, answer = await bench.post("/v1/chat/completions", CHAT)
    assert status == 404
    assert isinstance(answer, dict)
    assert "role prefill" in answer["error"]["message"]
    assert bench.service.requests == []


async def test_long_prompts_are_tokenized_beside_the_loop(bench: Bench) -> None:
    bench.service.context_tokens = bench.service.capacity_tokens = 10_000
    bench.service.script = tokens("ok")
    status, _, _ = await bench.post("/v1/completions", {**COMPLETION, "prompt": "y" * 5000})
    assert status == 200
    assert bench.service.requests[0].prompt == (ord("y"),) * 5000


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model": "tiny",}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": 1e999}', "not valid JSON"),
        (b"[" * 10_000 + b"]" * 10_000, "nested too deeply"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        (b"[1, 2]", "a JSON object, not a list"),
        (b"null", "a JSON object, not null"),
    ],
)
async def test_bodies_that_are_no_object(bench: Bench, data: bytes, part: str) -> None:
    headers = {"Content-Type": "application/json"}
    async with bench.client.post(
        bench.url + "/v1/completions", data=data, headers=headers
    ) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert part in error["message"]
    assert error["type"] == "invalid_request_error"
    status, _, _ = await bench.post("/v1/completions", COMPLETION)
    assert status == 200  # one bad request fails alone


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", None,
                     "application/json; charset=utf-16"],
)  # fmt: skip
async def test_wrong_content_type(bench: Bench, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    skip = () if content_type else (aiohttp.hdrs.CONTENT_TYPE,)
    async with bench.client.post(
        bench.url + "/v1/completions", data=b"{}", headers=headers, skip_auto_headers=skip
    ) as response:
        assert response.status == 415
        assert (await response.json())["error"]["code"] == "unsupported_media_type"
