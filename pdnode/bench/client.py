"""One streamed completion over HTTP, read strictly: one chunk with one choice is one token."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from pdnode.bench.figures import Trace

MAX_EVENT_BYTES = 64 << 10


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class BadAnswer(Exception):
    """An answer that is none. The text is the kind under which it is counted."""


_decoder = msgspec.json.Decoder(_Chunk)


async def stream_tokens(
    response: aiohttp.ClientResponse, expected: int
) -> AsyncGenerator[None, None]:
    """One item per token, as it comes. Raises BadAnswer unless the stream is complete, has exactly
    `expected` tokens, says so in its usage, and ends with `[DONE]`."""
    tokens, usage, finished = 0, None, False
    while True:
        event = await response.content.readuntil(b"\n\n", max_size=MAX_EVENT_BYTES)
        if event.startswith(b":"):
            continue  # a comment, as proxies send to keep the connection open
        if not event.endswith(b"\n\n"):
            raise BadAnswer("stream_cut")
        if not event.startswith(b"data: "):
            raise BadAnswer("malformed")
        payload = event[len(b"data: ") : -2]
        if payload == b"[DONE]":
            break
        try:
            chunk = _decoder.decode(payload)
        except msgspec.DecodeError:
            raise BadAnswer("malformed") from None
        if chunk.error is not None:
            raise BadAnswer(f"stream_{chunk.error.code or 'error'}")
        usage = chunk.usage or usage
        if not chunk.choices:
            continue
        if finished or len(chunk.choices) != 1:
            raise BadAnswer("malformed")
        finished = chunk.choices[0].finish_reason is not None
        tokens += 1
        yield None
    if not finished or tokens != expected:
        raise BadAnswer("wrong_length")
    if usage is None or usage.completion_tokens != tokens:
        raise BadAnswer("wrong_usage")


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    *,
    expected: int,
    start_s: float,
    clock: Callable[[], float],
    timeout_s: float,
    token_s: list[float],
) -> Trace:
    """POST `body` to `url`/v1/completions. Times go into `token_s` as tokens come, so that they are
    kept if this is cancelled. What goes wrong is in `Trace.error`."""
    error: str | None = None
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(
                f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
            ) as response,
        ):
            if response.status != 200:
                raise BadAnswer(f"http_{response.status}")
            async with aclosing(stream_tokens(response, expected)) as tokens:
                async for _ in tokens:
                    token_s.append(clock())
    except BadAnswer as bad:
        error = str(bad)
    except TimeoutError:
        error = "timeout"
    except HttpProcessingError:
        error = "malformed"  # an event beyond the limit
    except (aiohttp.ClientError, OSError):
        error = "connection"
    return Trace(start_s, token_s, clock(), error)
