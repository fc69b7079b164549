"""Reading the JSON object that a request carries."""

import asyncio

import msgspec
from aiohttp import web

from pdnode.api.errors import BodyTooLarge, RequestTimeout, WrongContentType
from pdnode.api.fields import kind_of
from pdnode.errors import BadRequest


async def read_object(request: web.Request, *, max_bytes: int, read_s: float) -> dict[str, object]:
    """The body as a JSON object.

    Raises:
        WrongContentType, BodyTooLarge, RequestTimeout, BadRequest: what is wrong with it.
    """
    if request.content_type != "application/json":
        raise WrongContentType(
            f"content type {request.content_type[:64]!r}; application/json is expected"
        )
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise WrongContentType("the body must be UTF-8")
    if (request.content_length or 0) > max_bytes:
        raise BodyTooLarge(
            f"the body has {request.content_length} bytes; at most {max_bytes} are allowed"
        )
    try:
        async with asyncio.timeout(read_s):
            data = await _read(request, max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {read_s:g} s") from None
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        # msgspec calls invalid escapes and a missing rest the same: its text is a hint only.
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {kind_of(value)}")
    return value


async def _read(request: web.Request, max_bytes: int) -> bytes:
    """Not Request.read(), whose limit is fixed when the application is built."""
    data = bytearray()
    async for piece in request.content.iter_any():
        data += piece
        if len(data) > max_bytes:
            raise BodyTooLarge(f"at most {max_bytes} bytes of body are allowed")
    return bytes(data)
