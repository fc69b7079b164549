"""Errors in OpenAI's form: the middleware that writes them, and the ones that only HTTP knows."""

import logging
import re
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from pdnode.api.limits import MAX_REQUEST_ID_CHARACTERS
from pdnode.errors import BadRequest, Cause
from pdnode.obs.log import fault

logger = logging.getLogger(__name__)

_REQUEST_ID = web.RequestKey("request_id", str)
_SANE_ID = re.compile(rf"[A-Za-z0-9._:\-]{{1,{MAX_REQUEST_ID_CHARACTERS}}}")
_STATUS_TYPES = {429: "rate_limit_error"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class UnknownRoute(BadRequest):
    status = 404
    code = "unknown_url"


class WrongMethod(BadRequest):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(BadRequest):
    status = 408
    code = "request_timeout"


class BodyTooLarge(BadRequest):
    status = 413
    code = "body_too_large"


class WrongContentType(BadRequest):
    status = 415
    code = "unsupported_media_type"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(cause: Cause) -> ErrorBody:
    kind = _STATUS_TYPES.get(
        cause.status, "invalid_request_error" if cause.status < 500 else "server_error"
    )
    param = cause.param if isinstance(cause, BadRequest) else None
    code = cause.code if cause.code != kind else None
    return ErrorBody(ErrorDetail(str(cause), kind, param, code))


def error_response(cause: Cause) -> web.Response:
    response = web.Response(
        status=cause.status,
        body=msgspec.json.encode(error_body(cause)),
        content_type="application/json",
    )
    if cause.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if cause.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(cause.retry_after_s)))
    return response


def request_id(request: web.Request) -> str:
    """The client's `x-request-id` if it is harmless in headers and logs, else one of our own."""
    known = request.get(_REQUEST_ID)
    if known is None:
        asked = request.headers.get("x-request-id", "")
        known = asked if _SANE_ID.fullmatch(asked) else secrets.token_hex(16)
        request[_REQUEST_ID] = known
    return known


def internal_error(request: web.Request) -> Cause:
    """What the client is told of an exception that nobody foresaw; the log gets the rest."""
    return Cause(f"internal error; request id {request_id(request)}")


@web.middleware
async def errors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception into an answer in OpenAI's form. The outermost middleware."""
    try:
        return await handler(request)
    except Cause as cause:
        return error_response(cause)
    except web.RequestPayloadError:
        return error_response(BadRequest("the request body could not be read"))
    except web.HTTPException as error:
        return _http_error(request, error)
    except Exception as error:  # noqa: BLE001 - the last resort: the client must hear of it
        fault(
            logger, "api.internal_error", "a handler failed", error,
            req=request_id(request), path=request.path[:256],
        )  # fmt: skip
        return error_response(internal_error(request))


async def mark_response(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: what every answer carries."""
    response.headers["x-request-id"] = request_id(request)
    response.headers["Server"] = "pdnode"


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals."""
    if isinstance(error, web.HTTPNotFound):
        return error_response(UnknownRoute(f"unknown route {request.method} {request.path[:256]}"))
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        response = error_response(
            WrongMethod(f"method {request.method[:32]} is not allowed here; allowed: {allowed}")
        )
        response.headers["Allow"] = allowed
        return response
    refused = BadRequest(error.reason)
    refused.status = error.status
    return error_response(refused)
