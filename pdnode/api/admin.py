"""The admin surface, on a unix socket only: what the node shows of itself, and what it can be told.

`GET`: snapshot, transfers, requests, events, config, log-level. `POST`: the actions, see
api/admin_actions.py. All bodies are JSON.
"""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from aiohttp import web

from pdnode.api.admin_actions import ActionRefused, Actions, Actor, RememberedAnswers, failed
from pdnode.api.httplog import http_logger
from pdnode.obs.events import EventRing
from pdnode.obs.fabric_report import Step
from pdnode.obs.records import Records

_http_log = http_logger("pdnode.api.admin.http")

SOCKET_MODE = 0o660
MAX_BODY_BYTES = 64 << 10
MAX_STREAMS = 16
"""Event streams at a time; one more is refused with 503."""

KEEP_ALIVE_S = 15.0
SHUTDOWN_S = 1.0
"""What open event streams get at the end before they are cut."""


class SettingValue(msgspec.Struct, frozen=True):
    """One value as it is in effect. Secrets are files: only their names are values."""

    key: str
    value: str  # as TOML writes it
    origin: str  # default | file | flag | pdnode role
    reload: bool  # a reload can change it


class ConfigView(msgspec.Struct, frozen=True):
    settings: Sequence[SettingValue]


class LogLevel(msgspec.Struct, frozen=True):
    level: str


class AdminNode(Actor, Protocol):
    """What the admin routes need of the node. Called on the event loop; only `act` waits."""

    def snapshot(self) -> bytes:
        """obs.snapshot.Snapshot as JSON."""

    def fabric_test(self, peer: str) -> AsyncIterator[Step]:
        """Measures the NIC pairs of a peer; ActionRefused."""

    def settings(self) -> Sequence[SettingValue]: ...
    def log_level(self) -> str: ...


class _Routes:
    def __init__(self, node: AdminNode, records: Records, events: EventRing) -> None:
        self._node = node
        self._records = records
        self._events = events
        self._streams = 0

    async def snapshot(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._node.snapshot(), content_type="application/json")

    async def transfers(self, _request: web.Request) -> web.Response:
        return _json(list(self._records.transfers))

    async def requests(self, _request: web.Request) -> web.Response:
        return _json(list(self._records.requests))

    async def config(self, _request: web.Request) -> web.Response:
        return _json(ConfigView(self._node.settings()))

    async def fabric_test(self, request: web.Request) -> web.StreamResponse:
        """`?peer=`: one JSON object a line, obs.fabric_report.Step; the last one has the report."""
        try:
            steps = self._node.fabric_test(request.query.get("peer", ""))
        except ActionRefused as refused:
            return failed(refused.status, str(refused))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        with suppress(ConnectionError):  # the reader left
            await response.prepare(request)
            async for step in steps:
                await response.write(msgspec.json.encode(step) + b"\n")
        return response

    async def log_level(self, _request: web.Request) -> web.Response:
        return _json(LogLevel(self._node.log_level()))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: those after the cursor, then each as it happens. The cursor is
        `?cursor=` or the header Last-Event-ID; none, or one of another boot, gets all there are.
        """
        asked = request.query.get("cursor") or request.headers.get("Last-Event-ID") or "0"
        if not (asked.isascii() and asked.isdecimal() and len(asked) < 20):
            return failed(400, "cursor: a number from an event's `cursor`, or 0")
        if self._streams >= MAX_STREAMS:
            return failed(503, f"{MAX_STREAMS} event streams are open, no more are served")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        self._streams += 1
        try:
            await response.prepare(request)
            await self._stream(response, int(asked))
        except ConnectionError:
            pass  # the reader left
        finally:
            self._streams -= 1
        return response

    async def _stream(self, response: web.StreamResponse, cursor: int) -> None:
        while True:
            for found in self._events.after(cursor):
                cursor = found.cursor
                data = msgspec.json.encode(found)
                await response.write(b"id: %d\ndata: %s\n\n" % (cursor, data))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._events.wait(cursor), KEEP_ALIVE_S)
                continue
            await response.write(b":\n\n")


def build_admin_app(node: AdminNode, records: Records, events: EventRing) -> web.Application:
    """All routes under /admin/v1. `transfers` (prefill side, with per-layer times) and `requests`
    (with phases) are the last obs.records.RING that ended, oldest first.
    """
    routes = _Routes(node, records, events)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/admin/v1/snapshot", routes.snapshot)
    app.router.add_get("/admin/v1/transfers", routes.transfers)
    app.router.add_get("/admin/v1/requests", routes.requests)
    app.router.add_get("/admin/v1/fabric-test", routes.fabric_test)
    app.router.add_get("/admin/v1/events", routes.events)
    app.router.add_get("/admin/v1/config", routes.config)
    app.router.add_get("/admin/v1/log-level", routes.log_level)
    Actions(node, RememberedAnswers()).add_routes(app)
    return app


async def listen_admin(app: web.Application, path: Path) -> web.AppRunner:
    """Binds `path` with mode 0660 whatever the umask; a stale socket file is replaced.

    OSError if the directory is missing or not writable, or another process listens there.
    """
    if path.is_socket():
        if _in_use(path):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        path.unlink()
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_http_log,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        os.chmod(path, SOCKET_MODE)
    except OSError:
        await runner.cleanup()
        raise
    return runner


def _in_use(path: Path) -> bool:
    """Whether a process listens on this socket file; one that was killed leaves its file behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a full backlog is an answer as well
        code = probe.connect_ex(str(path))
    return code in (0, errno.EAGAIN)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
