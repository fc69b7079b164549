"""Whole and streamed answers in OpenAI's form, and how they end when things go wrong."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping

import msgspec
import pytest

from pdnode.core.request import TokenEvent
from pdnode.errors import (
    BadRequest,
    Cause,
    PrefillLost,
    QueueFull,
    Stalled,
    Unavailable,
)
from tests.support.fake_service import END, Bench, FakeGeneration, serve, tokens

COMPLETION: Mapping[str, object] = {"model": "tiny", "prompt": "hello"}
CHAT: Mapping[str, object] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
WAIT_S = 5.0


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with serve(pieces={260: b"a.b"}) as served:
        yield served


def parse_events(raw: bytes) -> list[str]:
    """Payloads of a server-sent event stream in which every event is one `data:` line."""
    assert raw.endswith(b"\n\n")
    payloads = []
    for event in raw[:-2].split(b"\n\n"):
        assert event.startswith(b"data: ")
        assert b"\n" not in event
        payloads.append(event[len(b"data: ") :].decode())
    return payloads


async def stream(bench: Bench, path: str, body: Mapping[str, object]) -> list[str]:
    async with bench.client.post(bench.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["X-Pdnode-Prefill"] == "pf-1"
        assert response.headers["x-request-id"]
        return parse_events(await response.read())


async def chunks_of(bench: Bench, path: str, body: Mapping[str, object]) -> list[dict[str, object]]:
    payloads = await stream(bench, path, body)
    assert payloads[-1] == "[DONE]"
    return [msgspec.json.decode(payload, type=dict) for payload in payloads[:-1]]


async def test_a_whole_completion(bench: Bench) -> None:
    bench.service.script = tokens("Paris")
    status, headers, answer = await bench.post("/v1/completions", COMPLETION)
    assert status == 200
    assert headers["X-Pdnode-Prefill"] == "pf-1"
    assert isinstance(answer, dict)
    assert re.fullmatch(r"cmpl-[0-9a-f]{24}", answer.pop("id"))
    assert abs(answer.pop("created") - time.time()) < 60
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": "Paris", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert bench.service.generations[0].cancels == []


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_token_ids_are_returned_when_asked_for(
    bench: Bench, path: str, body: Mapping[str, object]
) -> None:
    bench.service.script = tokens("hey")
    wanted = [event.token for event in tokens("hey")]
    asked = {**body, "return_token_ids": True}
    _, _, answer = await bench.post(path, asked)
    assert isinstance(answer, dict)
    assert answer["choices"][0]["token_ids"] == wanted
    bench.service.script = tokens("hey")
    chunks = await chunks_of(bench, path, asked)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[token] for token in wanted]


async def test_a_whole_chat_completion(bench: Bench) -> None:
    bench.service.script = [*tokens("Oui", None), TokenEvent(END, 0.0, "stop")]
    status, _, answer = await bench.post("/v1/chat/completions", CHAT)
    assert status == 200
    assert isinstance(answer, dict)
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", answer["id"])
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Oui", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["completion_tokens"] == 4  # the end token counts, and shows nothing


async def test_a_streamed_completion_has_one_chunk_per_token(bench: Bench) -> None:
    text = "né 😀"
    bench.service.script = tokens(text)
    chunks = await chunks_of(bench, "/v1/completions", COMPLETION)
    assert len(chunks) == len(text.encode())
    choices = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index]
    assert "".join(choice["text"] for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices] == [None] * 7 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_streamed_chat_names_the_role_first(bench: Bench) -> None:
    bench.service.script = tokens("ab")
    chunks = await chunks_of(bench, "/v1/chat/completions", CHAT)
    assert [chunk["choices"] for chunk in chunks] == [
        [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": "a"},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        [{"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": "length"}],
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_usage_comes_last_and_without_choices(
    bench: Bench, path: str, body: Mapping[str, object]
) -> None:
    bench.service.script = tokens("abc")
    prompt = 5 if path == "/v1/completions" else len("user:hi\n")
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    options: dict[str, object] = {"include_usage": True, "never_heard_of": 1}
    chunks = await chunks_of(bench, path, {**body, "stream_options": options})
    assert len(chunks) == 4
    assert [chunk["usage"] for chunk in chunks[:3]] == [None] * 3
    assert chunks[3]["choices"] == []
    assert chunks[3]["usage"] == usage
    options["continuous_usage_stats"] = True
    chunks = await chunks_of(bench, path, {**body, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]  # type: ignore[index]
    assert counts == [1, 2, 3, 3]


async def test_stop_strings_end_the_answer_and_the_generation(bench: Bench) -> None:
    held = asyncio.Event()
    bench.service.script = [*tokens("one\n\nEND", None), held, *tokens("never")]
    body = {**COMPLETION, "stop": ["\n\nEND", "xyz"], "max_tokens": 50}
    status, _, answer = await bench.post("/v1/completions", body)
    assert status == 200
    assert isinstance(answer, dict)
    assert answer["choices"][0]["text"] == "one"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 8
    chunks = await chunks_of(bench, "/v1/completions", body)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]  # type: ignore[index]
    assert texts == ["o", "n", "e", "", "", "", "", ""]
    assert [generation.cancels for generation in bench.service.generations] == [["stop"], ["stop"]]


async def test_the_answer_is_cut_inside_a_token(bench: Bench) -> None:
    bench.service.script = [TokenEvent(260, 0.0, None), *tokens("never")]
    _, _, answer = await bench.post("/v1/completions", {**COMPLETION, "stop": "."})
    assert isinstance(answer, dict)
    assert answer["choices"][0]["text"] == "a"
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("cause", "status", "kind", "code", "retry"),
    [
        (BadRequest("too big", "max_tokens"), 400, "invalid_request_error", None, None),
        (QueueFull("256 wait"), 429, "rate_limit_error", "queue_full", "1"),
        (Unavailable("draining"), 503, "server_error", "unavailable", "1"),
        (PrefillLost("pf-1 is gone"), 502, "server_error", "prefill_lost", None),
        (Stalled("no progress for 30 s"), 504, "server_error", "stalled", None),
    ],
)
async def test_failures_before_the_first_token_have_a_status(
    bench: Bench,
    streamed: bool,
    cause: Cause,
    status: int,
    kind: str,
    code: str | None,
    retry: str | None,
) -> None:
    """Whether refused at admission or failed afterwards, streamed or not."""
    body = {**COMPLETION, "stream": streamed}
    for at_admission in (True, False):
        bench.service.refusal = cause if at_admission else None
        bench.service.script = [cause]
        got, headers, answer = await bench.post("/v1/completions", body)
        assert got == status
        assert headers.get("Retry-After") == retry
        assert headers["x-request-id"]
        param = "max_tokens" if status == 400 else None
        error = {"message": str(cause), "type": kind, "param": param, "code": code}
        assert answer == {"error": error}


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_failure_after_the_first_token_ends_the_stream_with_an_error(
    bench: Bench, path: str, body: Mapping[str, object]
) -> None:
    bench.service.script = [*tokens("ab", None), PrefillLost("pf-1 is gone")]
    payloads = await stream(bench, path, body)
    assert len(payloads) == 3
    assert msgspec.json.decode(payloads[-1]) == {
        "error": {
            "message": "pf-1 is gone",
            "type": "server_error",
            "param": None,
            "code": "prefill_lost",
        }
    }


async def test_a_cancel_from_elsewhere_is_not_silent(bench: Bench) -> None:
    bench.service.script = tokens("ab", None)
    payloads = await stream(bench, "/v1/completions", COMPLETION)
    error = msgspec.json.decode(payloads[-1])["error"]
    assert (error["code"], error["message"]) == ("cancelled", "the request was cancelled")


@pytest.mark.parametrize("streamed", [False, True])
async def test_bugs_are_logged_once_and_not_shown(
    bench: Bench, caplog: pytest.LogCaptureFixture, streamed: bool
) -> None:
    bench.service.script = [*tokens("a", None), RuntimeError("secret detail")]
    headers = {"x-request-id": "mine-1"}
    body = {**COMPLETION, "stream": streamed}
    with caplog.at_level(logging.WARNING):
        async with bench.client.post(
            bench.url + "/v1/completions", json=body, headers=headers
        ) as response:
            assert response.status == (200 if streamed else 500)
            text = await response.text()
    assert "internal error; request id mine-1" in text
    assert "secret detail" not in text
    [record] = caplog.records
    assert record.code == "api.internal_error"  # type: ignore[attr-defined]
    assert record.fields["req"].startswith("mine-1")  # type: ignore[attr-defined]
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1.2:3_4", True), ("a" * 128, True), ("a" * 129, False), ("a b", False)]
)
async def test_request_ids(bench: Bench, sent: str, kept: bool) -> None:
    for path in ("/v1/completions", "/health", "/nowhere"):
        async with bench.client.post(
            bench.url + path, json=COMPLETION, headers={"x-request-id": sent}
        ) as response:
            got = response.headers["x-request-id"]
        assert (got == sent) == kept
        assert re.fullmatch(r"[0-9a-f]{32}", got) or kept
    assert bench.service.requests[0].request_id.startswith(f"{sent}-") == kept


async def test_duplicate_request_ids_stay_apart(bench: Bench) -> None:
    headers = {"x-request-id": "same"}
    for _ in range(2):
        async with bench.client.post(
            bench.url + "/v1/completions", json=COMPLETION, headers=headers
        ) as response:
            assert response.status == 200
    first, second = (request.request_id for request in bench.service.requests)
    assert first != second


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_while_tokens_come_cancels(bench: Bench, streamed: bool) -> None:
    bench.service.script = [*tokens("ab", None), asyncio.Event()]
    reader, writer = await open_request(bench, {**COMPLETION, "stream": streamed})
    await asyncio.wait_for(bench.service.submitting.wait(), WAIT_S)
    if streamed:
        await asyncio.wait_for(reader.readuntil(b"data: "), WAIT_S)
    writer.close()
    generation = await first_generation(bench)
    await asyncio.wait_for(generation.cancelled.wait(), WAIT_S)
    assert generation.cancels == ["abort"]
    shown = bench.metrics.render("")[0].decode()
    assert 'finished_reason="abort",model_name="tiny"} 1.0' in shown


async def test_a_client_that_leaves_during_admission_cancels_the_submit(bench: Bench) -> None:
    bench.service.hold = asyncio.Event()
    _, writer = await open_request(bench, COMPLETION)
    await asyncio.wait_for(bench.service.submitting.wait(), WAIT_S)
    writer.close()
    await asyncio.wait_for(bench.service.submit_cancelled.wait(), WAIT_S)
    assert bench.service.generations == []


async def open_request(
    bench: Bench, body: Mapping[str, object]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(bench.host, bench.port)
    data = msgspec.json.encode(body)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    await writer.drain()
    return reader, writer


async def first_generation(bench: Bench) -> FakeGeneration:
    async with asyncio.timeout(WAIT_S):
        while not bench.service.generations:
            await asyncio.sleep(0)
    return bench.service.generations[0]
