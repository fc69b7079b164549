"""Server-sent events: one chunk per token, and an end that is never silent."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from aiohttp import web

from pdnode.api.forms import Form, MaybeUsage, Usage
from pdnode.api.text import Piece
from pdnode.errors import ClientGone

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the chunks back
}
_encoder = msgspec.json.Encoder()


class EventWriter:
    """The response of one stream. Opened with the first event, so that a failure before the first
    token still has a status of its own.
    """

    def __init__(self, request: web.Request, prefill: Callable[[], str], *, write_s: float) -> None:
        """`prefill` is asked when the first event goes out."""
        self._request = request
        self._prefill = prefill
        self._write_s = write_s
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def opened(self) -> bool:
        """The status line may be out; from here on failures are events."""
        return self.response.prepared

    async def send(self, value: msgspec.Struct) -> None:
        """One event. Raises errors.ClientGone when the client left or does not read."""
        await self._write(b"data: " + _encoder.encode(value) + b"\n\n")

    async def done(self) -> None:
        await self._write(b"data: [DONE]\n\n")

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_s):
                if not self.response.prepared:
                    # Only now: a retry on another peer may have changed it until here.
                    self.response.headers["X-Pdnode-Prefill"] = self._prefill()
                    await self.response.prepare(self._request)
                await self.response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone(f"the client read nothing for {self._write_s:g} s") from None
        except ConnectionError as error:
            raise ClientGone("the client left") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    prompt_tokens: int
    include_usage: bool
    continuous_usage: bool


async def stream_answer(
    writer: EventWriter,
    pieces: AsyncGenerator[Piece, None],
    form: Form,
    options: StreamOptions,
) -> None:
    """Write all of `pieces`, then the usage if asked for, then `[DONE]`.

    Raises whatever comes before the first event is out; ClientGone later too.
    """
    completion = 0  # tokens of all choices
    async with aclosing(pieces):
        async for piece in pieces:
            completion += len(piece.tokens)
            usage: MaybeUsage = msgspec.UNSET
            if options.continuous_usage:
                usage = Usage.of(prompt=options.prompt_tokens, completion=completion)
            elif options.include_usage:
                usage = None
            await writer.send(form.chunk(piece, usage))
    if options.include_usage:
        usage = Usage.of(prompt=options.prompt_tokens, completion=completion)
        await writer.send(form.usage_chunk(usage))
    await writer.done()
