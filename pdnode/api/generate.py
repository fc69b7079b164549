"""From a validated request to its answer, whole or streamed, whatever happens in between.

An admitted generation is always either finished or cancelled when the handler is left: by an
error, by a stop string, or because the client left, which cancels the handler's task.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from aiohttp import web

from pdnode.api.errors import error_body, internal_error
from pdnode.api.forms import Form, Usage
from pdnode.api.service import Generation, Service
from pdnode.api.stream import EventWriter, StreamOptions, stream_answer
from pdnode.api.text import Assembler, Piece, joined
from pdnode.core.request import Request
from pdnode.errors import Cancelled, Cause, ClientGone
from pdnode.obs.log import fault
from pdnode.obs.metrics import RequestMeter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One generation of a request, and what is kept of it."""

    request: Request
    assembler: Assembler
    meter: RequestMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One validated request, and what its answer is made with."""

    choices: tuple[Choice, ...]  # at least one, all of one prompt
    form: Form
    stream: StreamOptions | None  # None: one whole answer


@dataclass(frozen=True, slots=True)
class _Running:
    choice: Choice
    generation: Generation


async def answer(
    http: web.Request, service: Service, work: Work, *, write_s: float
) -> web.StreamResponse:
    """Admit `work` and answer it. Raises errors.Cause while there is no status yet."""
    running: list[_Running] = []
    answered = False
    outcome = "abort"  # of what has not finished, if this task is cancelled
    try:
        for choice in work.choices:
            choice.meter.submitted()
            running.append(_Running(choice, await service.submit(choice.request)))
            choice.meter.admitted(len(choice.request.prompt))
        if work.stream is None:
            response: web.StreamResponse = await _whole(running, work)
        else:
            response = await _streamed(http, running, work, work.stream, write_s=write_s)
        answered, outcome = True, "error"
        return response
    except ClientGone:
        raise
    except Exception:
        outcome = "error"
        raise
    finally:
        for one in running:
            finish = one.choice.assembler.finish
            if finish is None:
                one.generation.cancel(outcome)
            one.choice.meter.ended(finish if answered and finish is not None else outcome)


async def _whole(running: Sequence[_Running], work: Work) -> web.Response:
    found: list[list[Piece]] = [[] for _ in running]
    async with aclosing(_pieces(running)) as pieces:
        async for piece in pieces:
            found[piece.choice].append(piece)
    choices = [joined(of_one) for of_one in found]
    usage = Usage.of(
        prompt=len(work.choices[0].request.prompt),
        completion=sum(len(choice.tokens) for choice in choices),
    )
    return web.Response(
        body=msgspec.json.encode(work.form.whole(choices, usage)),
        content_type="application/json",
        headers={"X-Pdnode-Prefill": _prefill(running)},
    )


def _prefill(running: Sequence[_Running]) -> str:
    """Who computed the prompt of the choices that have begun: usually one name."""
    begun = [one for one in running if one.choice.assembler.begun]
    return ", ".join(dict.fromkeys(one.generation.prefill for one in begun))


async def _streamed(
    http: web.Request,
    running: Sequence[_Running],
    work: Work,
    options: StreamOptions,
    *,
    write_s: float,
) -> web.StreamResponse:
    writer = EventWriter(http, lambda: _prefill(running), write_s=write_s)
    try:
        await stream_answer(writer, _pieces(running), work.form, options)
    except ClientGone:
        raise
    except Cause as cause:
        if not writer.opened:
            raise
        await writer.send(error_body(cause))
    except Exception as error:
        if not writer.opened:
            raise
        request_id = work.choices[0].request.request_id
        fault(logger, "api.internal_error", "a stream failed", error, req=request_id)
        await writer.send(error_body(internal_error(http)))
    return writer.response


async def _pieces(running: Sequence[_Running]) -> AsyncGenerator[Piece, None]:
    """Pieces of all choices as they come; each choice ends with one that has `finish`. The first
    failure of one is raised and ends all."""
    if len(running) == 1:
        async with aclosing(_pieces_of(running[0])) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(maxsize=len(running))
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(_forward(one, queue)) for one in running]
    try:
        left = len(running)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finish is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(one: _Running, queue: asyncio.Queue[Piece | Exception]) -> None:
    try:
        async with aclosing(_pieces_of(one)) as pieces:
            async for piece in pieces:
                await queue.put(piece)
    except Exception as error:  # noqa: BLE001 - raised again by whoever reads the queue
        await queue.put(error)


async def _pieces_of(one: _Running) -> AsyncGenerator[Piece, None]:
    """Text pieces up to the one with `finish`. Raises errors.Cause when the tokens end before."""
    choice, generation = one.choice, one.generation
    async for event in generation.events():
        piece = choice.assembler.push(event)
        for _ in piece.tokens:
            choice.meter.token()
        if piece.finish is not None and event.finish is None:
            generation.cancel("stop")  # a stop string: its pages are not needed any more
        yield piece
        if piece.finish is not None:
            return
    raise Cancelled("the request was cancelled")
