"""openai-python, unchanged, against the real listener: requests, answers, errors, retries."""

import time
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from pdnode.core.request import TokenEvent
from pdnode.errors import PrefillLost, QueueFull, Unavailable
from tests.support.fake_service import Bench, serve, tokens

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with serve() as served:
        yield served


@pytest.fixture
async def client(bench: Bench) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{bench.url}/v1", api_key="unused", max_retries=0, timeout=30.0
    ) as made:
        yield made


async def test_models(client: AsyncOpenAI) -> None:
    found = [model async for model in client.models.list()]
    assert [model.id for model in found] == ["tiny"]
    assert found[0].created > 1_700_000_000


async def test_a_completion_with_everything(bench: Bench, client: AsyncOpenAI) -> None:
    bench.service.script = [
        TokenEvent(ord("o"), -0.5, None, ((ord("o"), -0.5), (ord("p"), -1.5))),
        TokenEvent(ord("k"), -0.25, "length", ((ord("k"), -0.25), (ord("l"), -2.5))),
    ]
    answer = await client.completions.create(
        model="tiny", prompt="hey", max_tokens=2, logprobs=2, n=2, best_of=2, echo=False, seed=3,
        logit_bias={"65": -100}, presence_penalty=0.5, frequency_penalty=0.25, temperature=0.0,
        extra_body={"repetition_penalty": 1.1, "ignore_eos": True},
    )  # fmt: skip
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "ok"), (1, "ok")]
    found = answer.choices[1].logprobs
    assert found is not None
    assert found.tokens == ["o", "k"]
    assert found.token_logprobs == [-0.5, -0.25]
    assert found.top_logprobs == [{"o": -0.5, "p": -1.5}, {"k": -0.25, "l": -2.5}]
    assert found.text_offset == [0, 1]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    request = bench.service.requests[1]
    assert (request.seed, request.logit_bias, request.repetition_penalty) == (
        4,
        ((65, -100.0),),
        1.1,
    )
    assert (request.presence_penalty, request.frequency_penalty) == (0.5, 0.25)
    assert request.stop_tokens == frozenset()


async def test_a_chat_with_logprobs(bench: Bench, client: AsyncOpenAI) -> None:
    first, second = "é".encode()
    bench.service.script = [
        TokenEvent(first, -0.5, None, ((first, -0.5),)),
        TokenEvent(second, -0.25, "stop", ((second, -0.25),)),
    ]
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, max_completion_tokens=5
    )  # type: ignore[call-overload]
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.role == "assistant"
    assert [entry.bytes for entry in choice.logprobs.content] == [[first], [second]]
    assert [entry.token for entry in choice.logprobs.content] == ["\\xc3", "\\xa9"]
    assert choice.logprobs.content[1].top_logprobs[0].logprob == -0.25
    assert answer.usage.completion_tokens == 2


async def test_a_streamed_chat(bench: Bench, client: AsyncOpenAI) -> None:
    bench.service.script = tokens("né!")
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    texts = {0: "", 1: ""}
    usage = None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content
        usage = chunk.usage or usage
    assert texts == {0: "né!", 1: "né!"}
    assert (usage.prompt_tokens, usage.completion_tokens) == (len("user:hi\n"), 8)


async def test_a_streamed_completion(bench: Bench, client: AsyncOpenAI) -> None:
    bench.service.script = tokens("abc")
    stream = await client.completions.create(
        model="tiny", prompt="hey", stream=True, echo=True, logprobs=0
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].text for chunk in chunks] == ["heya", "b", "c"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]
    assert [chunk.choices[0].logprobs.text_offset for chunk in chunks] == [[3], [4], [5]]


async def test_errors_have_their_classes(bench: Bench, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="tiny", prompt="hey", n=99)
    assert refused.value.param == "n"
    assert refused.value.type == "invalid_request_error"
    assert "1 to 8" in refused.value.message
    assert refused.value.request_id
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="gpt", prompt="hey")
    assert unknown.value.code == "model_not_found"
    for cause, error in ((QueueFull("full"), openai.RateLimitError),
                         (Unavailable("draining"), openai.InternalServerError)):  # fmt: skip
        bench.service.refusal = cause
        with pytest.raises(error) as failed:
            await client.completions.create(model="tiny", prompt="hey")
        assert failed.value.status_code == cause.status


async def test_a_stream_that_breaks_raises(bench: Bench, client: AsyncOpenAI) -> None:
    bench.service.script = [*tokens("ab", None), PrefillLost("pf-1 is gone")]
    stream = await client.completions.create(model="tiny", prompt="hey", stream=True)
    parts = aiter(stream)
    assert [(await anext(parts)).choices[0].text for _ in range(2)] == ["a", "b"]
    with pytest.raises(openai.APIError) as broken:
        await anext(parts)
    assert "pf-1 is gone" in broken.value.message
    assert broken.value.code == "prefill_lost"


@pytest.mark.parametrize("cause", [QueueFull("256 wait"), Unavailable("draining")])
async def test_a_retry_waits_as_long_as_it_is_told(
    bench: Bench, client: AsyncOpenAI, cause: QueueFull | Unavailable
) -> None:
    """Without the header the client's first wait is at most half a second."""
    plain = bench.service.submit

    async def submit(request):  # noqa: ANN001, ANN202
        bench.service.refusal = None if bench.service.requests else cause
        return await plain(request)

    bench.service.submit = submit  # type: ignore[method-assign]
    began = time.monotonic()
    answer = await client.with_options(max_retries=2).completions.create(model="tiny", prompt="hey")
    assert answer.choices[0].text == "hi"
    assert len(bench.service.requests) == 2
    assert time.monotonic() - began >= 1.0


async def test_bad_requests_are_not_retried(bench: Bench, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        await client.with_options(max_retries=5).completions.create(model="tiny", prompt="")
    assert bench.service.requests == []
