"""The TCP listener of the API: bounded connections, bounded heads, handlers that end with their
client.
"""

import asyncio
import logging
import resource

import msgspec
from aiohttp import web

from pdnode.api.errors import error_body
from pdnode.api.httplog import http_logger
from pdnode.api.limits import (
    ACCEPT_BACKLOG,
    DESCRIPTORS_FOR_CONNECTIONS,
    MAX_HEADER_FIELD_BYTES,
    MAX_HEADER_LINE_BYTES,
    MAX_HEADERS,
    Timeouts,
)
from pdnode.config import ApiConfig
from pdnode.errors import Unavailable
from pdnode.obs.log import event

logger = logging.getLogger(__name__)
_http_log = http_logger("pdnode.api.http")
_DEFAULT_TIMEOUTS = Timeouts()


class ApiListener:
    """Serves one application on one address."""

    def __init__(
        self,
        app: web.Application,
        config: ApiConfig,
        timeouts: Timeouts = _DEFAULT_TIMEOUTS,
    ) -> None:
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=_http_log,
            keepalive_timeout=timeouts.idle_s,
            max_line_size=MAX_HEADER_LINE_BYTES,
            max_field_size=MAX_HEADER_FIELD_BYTES,
            max_headers=MAX_HEADERS,
            shutdown_timeout=timeouts.refused_s,
        )
        self._config = config
        self._timeouts = timeouts
        self._limit = _connection_limit(config.max_connections)
        self._server: asyncio.Server | None = None
        self.open = 0  # connections being served
        self.refused = 0  # connections answered with 503 for being too many

    async def start(self) -> tuple[str, int]:
        """Bind and serve. Returns the bound address. Raises OSError when the port is taken."""
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Gate(self),
                self._config.host,
                self._config.port,
                backlog=ACCEPT_BACKLOG,
            )
        except OSError:
            await self._runner.cleanup()
            raise
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def stop(self) -> None:
        """Stop accepting, then end what is left: handlers get `refused_s` before they are
        cancelled. Whoever drains waits for the requests before this.
        """
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def reload(self, config: ApiConfig) -> None:
        """A new limit; connections that are open stay."""
        self._limit = _connection_limit(config.max_connections)

    def take(self) -> asyncio.Protocol:
        """The protocol for one more connection: one that serves it, or one that refuses it."""
        assert self._runner.server is not None
        if self.open < self._limit:
            return self._runner.server()
        self.refused += 1
        return _Refusal(self._timeouts.refused_s)


class _Gate(asyncio.Protocol):
    """One connection. Counts it, and passes everything on to the protocol it was given."""

    __slots__ = ("_inner", "_listener", "_served")

    def __init__(self, listener: ApiListener) -> None:
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not at construction: many are constructed before the first of them is connected.
        self._inner = self._listener.take()
        self._served = not isinstance(self._inner, _Refusal)
        self._listener.open += self._served
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.open -= self._served
        self._inner.connection_lost(exc)


class _Refusal(asyncio.Protocol):
    """Says 503 and hangs up. It reads once before, since closing on unread bytes resets the
    connection and loses the answer.
    """

    __slots__ = ("_linger_s", "_timer", "_transport")

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._linger_s, transport.abort)
        transport.write(_REFUSED)

    def data_received(self, data: bytes) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()


def _refused_answer() -> bytes:
    body = msgspec.json.encode(error_body(Unavailable("too many connections")))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_REFUSED = _refused_answer()


def _connection_limit(asked: int) -> int:
    """`max_connections`, or fewer where the process may not open so many descriptors."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = int(soft * DESCRIPTORS_FOR_CONNECTIONS)
    if soft == resource.RLIM_INFINITY or asked <= allowed:
        return asked
    event(
        logger, logging.WARNING, "api.connections_limited", "fewer connections than configured",
        asked=asked, limit=allowed, nofile=soft,
    )  # fmt: skip
    return allowed
