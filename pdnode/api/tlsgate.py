"""TLS before a connection of the peer listener is served."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable


class TlsGate(asyncio.Protocol):
    """One connection: shakes hands, then hands it to the protocol that `serve` makes.

    `ended` is called once the handshake is over, however it went. The context is the one of the
    moment, so that new certificates hold for every connection that comes after them.
    """

    __slots__ = ("_context", "_early", "_ended", "_inner", "_serve", "_task", "_timeout_s")

    def __init__(
        self,
        context: ssl.SSLContext,
        serve: Callable[[], asyncio.Protocol],
        ended: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._context = context
        self._serve = serve
        self._ended = ended
        self._timeout_s = timeout_s
        self._inner: asyncio.Protocol | None = None
        self._early: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._task = asyncio.create_task(self._shake(transport))

    async def _shake(self, transport: asyncio.Transport) -> None:
        secure: asyncio.Transport | None = None
        try:
            with contextlib.suppress(OSError):  # ssl.SSLError is one; so is the time-out
                secure = await asyncio.get_running_loop().start_tls(
                    transport, self, self._context, server_side=True,
                    ssl_handshake_timeout=self._timeout_s,
                )  # fmt: skip
        finally:
            self._ended()
        if secure is None:
            transport.abort()
            return
        self._inner = self._serve()
        self._inner.connection_made(secure)
        for data in self._early:
            self._inner.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self._inner is None:
            self._early.append(data)
        else:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner is not None:
            self._inner.connection_lost(exc)
