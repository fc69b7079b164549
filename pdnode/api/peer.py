"""The WebSocket of the peer link: bytes in, bytes out, and nothing of what they mean.

The decode node dials (`PeerDialer`), the prefill node listens (`PeerListener`, the only route of
the peer listener). Both hand over a `LinkSocket`. Whatever arrives ends in `receive`: a frame, or
None with a cause. Text frames, frames that are too large and broken WebSocket frames close the
socket. Everything is bounded: frame size, outbox, connections that have not proved themselves and
the time they get for it, the time that closing takes.
"""

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from yarl import URL

from pdnode.api.httplog import http_logger
from pdnode.api.tlsgate import TlsGate
from pdnode.config import PeerConfig
from pdnode.core.wire import MAX_FRAME_BYTES, clip
from pdnode.peertls import names_of

LINK_PATH = "/peer/v1/link"
MAX_OUTBOX_FRAMES = 2048
MAX_OUTBOX_BYTES = 16 * MAX_FRAME_BYTES
MAX_UNPROVED = 32  # connections that have not authenticated yet, WebSocket or not
CLOSE_S = 1.0  # for flushing the outbox and the closing handshake
_AUTH_STEPS = 2  # the acceptor's: auth and proof, each bounded by connect_timeout_s
_MAX_HEAD_BYTES = 4096

_http_log = http_logger("pdnode.api.peer.http")


class LinkSocket:
    """One WebSocket. `send` and `close` never block and never raise; one task calls `receive`."""

    def __init__(
        self,
        ws: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
        *,
        address: str,
        proved: Callable[[], None],
    ) -> None:
        self.address = address
        self.cause = ""  # why `receive` returned None
        self.names = names_of(ws.get_extra_info("peercert") or {})  # of its certificate
        self._ws = ws
        self._proved = proved
        self._outbox: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._closing: str | None = None
        self._writer = asyncio.create_task(self._write())

    def send(self, data: bytes) -> None:
        """Queue one frame. A peer that does not take them fast enough loses the link."""
        if self._closing is not None:
            return
        if (
            len(self._outbox) >= MAX_OUTBOX_FRAMES
            or self._queued_bytes + len(data) > MAX_OUTBOX_BYTES
        ):
            self._fail(
                f"outbox full: {len(self._outbox)} frames of {self._queued_bytes} bytes wait, "
                f"at most {MAX_OUTBOX_FRAMES} and {MAX_OUTBOX_BYTES} may"
            )
            return
        self._outbox.append(data)
        self._queued_bytes += len(data)
        self._wake.set()

    async def receive(self) -> bytes | None:
        """The next frame, or None at the end: `cause` says why."""
        message = await self._ws.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            data: bytes = message.data
            return data
        if not self.cause:
            self.cause = _ending(message)
        return None

    def proved(self) -> None:
        """The peer has authenticated: it no longer counts as a stranger."""
        self._proved()

    def close(self, text: str) -> None:
        """Send what is queued, say goodbye, close; by force after CLOSE_S."""
        if self._closing is None:
            self._closing = clip(text)
            self._wake.set()
            asyncio.get_running_loop().call_later(CLOSE_S, self._abort)

    async def wait_closed(self) -> None:
        """After `close`: returns within CLOSE_S, with the descriptor gone or going."""
        await asyncio.wait([self._writer])

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            while True:
                while self._outbox:
                    data = self._outbox.popleft()
                    self._queued_bytes -= len(data)
                    await self._ws.send_bytes(data)
                if self._closing is not None:
                    break
                self._wake.clear()
                await self._wake.wait()
            reason = self._closing.encode()[:120].decode(errors="ignore").encode()
            await self._ws.close(code=aiohttp.WSCloseCode.OK, message=reason)

    def _fail(self, cause: str) -> None:
        self.cause = self.cause or cause
        self._outbox.clear()
        self.close(cause)
        self._abort()

    def _abort(self) -> None:
        """Close now: a plain close would wait for a peer that reads nothing any more."""
        raw = self._ws.get_extra_info("socket")
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_RDWR)


class PeerListener:
    """The peer listener of a prefill node. `accept` serves one link and returns at its end."""

    def __init__(self, config: PeerConfig, accept: Callable[[LinkSocket], Awaitable[None]]) -> None:
        app = web.Application()
        app.router.add_get(LINK_PATH, self._serve)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_log,
            max_line_size=_MAX_HEAD_BYTES,
            max_field_size=_MAX_HEAD_BYTES,
            shutdown_timeout=2 * CLOSE_S,
        )
        self._config = config
        self._accept = accept
        self._server: asyncio.Server | None = None
        self._known: set[asyncio.BaseProtocol] = set()
        self._shaking = 0  # TLS handshakes under way
        self.turned_away = 0  # connections refused for want of room, or too slow to authenticate

    async def start(self) -> tuple[str, int]:
        """Bind and serve; returns the bound address. Raises OSError when the port is taken."""
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._protocol, self._config.host, self._config.port
            )
        except OSError:
            await self._runner.cleanup()
            raise
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def stop(self) -> None:
        """Stop listening and end what is left. Close the links first (PeerManager.close)."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def reload(self, config: PeerConfig) -> None:
        """New certificates hold for connections that come from now on."""
        self._config = dataclasses.replace(self._config, tls=config.tls)

    def _protocol(self) -> asyncio.Protocol:
        web_server = self._runner.server
        assert web_server is not None
        if len(web_server.connections) - len(self._known) + self._shaking >= MAX_UNPROVED:
            self.turned_away += 1
            return _TurnedAway()
        tls = self._config.tls
        if tls is None:
            return self._handler()
        self._shaking += 1
        timeout_s = self._config.connect_timeout_s
        return TlsGate(tls.accept, self._handler, self._shaken, timeout_s)

    def _shaken(self) -> None:
        self._shaking -= 1

    def _handler(self) -> RequestHandler:
        assert self._runner.server is not None
        handler = self._runner.server()
        patience_s = _AUTH_STEPS * self._config.connect_timeout_s
        asyncio.get_running_loop().call_later(patience_s, self._expire, handler)
        return handler

    def _expire(self, handler: RequestHandler) -> None:
        if handler not in self._known and handler.transport is not None:
            self.turned_away += 1
            handler.transport.abort()

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(
            timeout=CLOSE_S, compress=False, max_msg_size=MAX_FRAME_BYTES + 1
        )
        await ws.prepare(request)
        handler = request.protocol
        link = LinkSocket(ws, address=str(request.remote), proved=lambda: self._known.add(handler))
        try:
            await self._accept(link)
        finally:
            self._known.discard(handler)
            link.close("the listener is done with it")
            await link.wait_closed()
        return ws


class PeerDialer:
    """Opens links from a decode node."""

    def __init__(self, config: PeerConfig) -> None:
        self._timeout_s = config.connect_timeout_s
        self._tls = config.tls
        self._session: aiohttp.ClientSession | None = None

    def reload(self, config: PeerConfig) -> None:
        """New certificates hold for links that are made from now on."""
        self._tls = config.tls

    async def dial(self, host: str, port: int) -> LinkSocket:
        """Raises OSError (ConnectionError, TimeoutError) whose text names what went wrong."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True, use_dns_cache=False),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        scheme = "http" if self._tls is None else "https"
        url = URL.build(scheme=scheme, host=host, port=port, path=LINK_PATH)
        try:
            async with asyncio.timeout(self._timeout_s):
                ws = await self._session.ws_connect(
                    url,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                    max_msg_size=MAX_FRAME_BYTES + 1,
                    ssl=True if self._tls is None else self._tls.dial,
                )
        except TimeoutError:
            raise TimeoutError(
                f"{url.authority} did not answer within {self._timeout_s:g} s"
            ) from None
        except aiohttp.WSServerHandshakeError as error:
            raise ConnectionError(
                f"{url.authority} answers HTTP {error.status}: no peer listener"
            ) from error
        except (aiohttp.ClientConnectorSSLError, aiohttp.ClientConnectorCertificateError) as error:
            raise ConnectionError(f"{url.authority}: TLS: {error}") from error
        except aiohttp.ClientConnectorError as error:
            code, text = error.os_error.errno, error.os_error.strerror
            words = os.strerror(code) if code and code > 0 else text
            raise ConnectionError(f"{url.authority}: {words}") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{url.authority}: {error}") from error
        return LinkSocket(ws, address=url.authority, proved=lambda: None)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _ending(message: aiohttp.WSMessage) -> str:
    """Why a message that is no frame ends the link."""
    match message.type:
        case aiohttp.WSMsgType.TEXT:
            return "a text frame; only binary ones are taken"
        case aiohttp.WSMsgType.ERROR:
            return f"broken WebSocket frame: {message.data}"
        case aiohttp.WSMsgType.CLOSE:
            return clip(f"closed by the peer: {message.extra or message.data}")
        case _:
            return "connection closed"
