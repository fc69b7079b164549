"""From a validated request to its answer, whole or streamed, whatever happens in between.

An admitted generation is always either finished or cancelled when the handler is left: by an
error, by a stop string, or because the client left, which cancels the handler's task.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from aiohttp import web

from pdnode.api.errors import error_body, internal_error
from pdnode.api.forms import Form, Usage
from pdnode.api.service import Generation, Service
from pdnode.api.stream import EventWriter, StreamOptions, stream_answer
from pdnode.api.text import Assembler, Piece
from pdnode.core.request import Request
from pdnode.errors import Cause, ClientGone
from pdnode.obs.metrics import RequestMeter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One validated request, and what its answer is made with."""

    request: Request
    form: Form
    assembler: Assembler
    meter: RequestMeter
    stream: StreamOptions | None  # None: one whole answer


async def answer(
    http: web.Request, service: Service, work: Work, *, write_s: float
) -> web.StreamResponse:
    """Admit `work` and answer it. Raises errors.Cause while there is no status yet."""
    generation = await service.submit(work.request)
    work.meter.admitted(len(work.request.prompt))
    outcome = "abort"  # what it is if this task is cancelled
    try:
        if work.stream is None:
            response: web.StreamResponse = await _whole(generation, work)
        else:
            response = await _streamed(http, generation, work, work.stream, write_s=write_s)
        outcome = work.assembler.finish or "error"
        return response
    except ClientGone:
        raise
    except Exception:
        outcome = "error"
        raise
    finally:
        if work.assembler.finish is None:
            generation.cancel(outcome)
        work.meter.ended(outcome)


async def _whole(generation: Generation, work: Work) -> web.Response:
    texts: list[str] = []
    tokens: list[int] = []
    async with aclosing(_pieces(generation, work)) as pieces:
        async for piece in pieces:
            texts.append(piece.text)
            tokens.append(piece.token)
    finish = work.assembler.finish
    assert finish is not None
    usage = Usage.of(prompt=len(work.request.prompt), completion=work.assembler.tokens)
    return web.Response(
        body=msgspec.json.encode(work.form.whole("".join(texts), finish, usage, tokens)),
        content_type="application/json",
        headers={"X-Pdnode-Prefill": generation.prefill},
    )


async def _streamed(
    http: web.Request,
    generation: Generation,
    work: Work,
    options: StreamOptions,
    *,
    write_s: float,
) -> web.StreamResponse:
    writer = EventWriter(http, generation, write_s=write_s)
    try:
        await stream_answer(writer, _pieces(generation, work), work.assembler, work.form, options)
    except ClientGone:
        raise
    except Cause as cause:
        if not writer.opened:
            raise
        await writer.send(error_body(cause))
    except Exception:
        if not writer.opened:
            raise
        logger.exception("api.internal_error req=%s", work.request.request_id)
        await writer.send(error_body(internal_error(http)))
    return writer.response


async def _pieces(generation: Generation, work: Work) -> AsyncGenerator[Piece, None]:
    """Text pieces up to the one with `finish`. Raises errors.Cause when the tokens end before."""
    async for event in generation.events():
        work.meter.token()
        piece = work.assembler.push(event)
        if piece.finish is not None and event.finish is None:
            generation.cancel("stop")  # a stop string: its pages are not needed any more
        yield piece
        if piece.finish is not None:
            return
    raise Cause("the request was cancelled")
