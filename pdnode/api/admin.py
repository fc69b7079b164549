"""The admin surface, on a unix socket only: what finished requests and transfers left behind."""

import errno
import os
import socket
from pathlib import Path

import msgspec
from aiohttp import web

from pdnode.obs.records import Records

SOCKET_MODE = 0o660


def build_admin_app(records: Records) -> web.Application:
    """`GET /admin/v1/transfers` (prefill side, with per-layer times) and `GET /admin/v1/requests`
    (decode side, with phases): JSON lists, oldest first, the last obs.records.RING of each."""

    async def transfers(request: web.Request) -> web.Response:
        return _json(list(records.transfers))

    async def requests(request: web.Request) -> web.Response:
        return _json(list(records.requests))

    app = web.Application()
    app.router.add_get("/admin/v1/transfers", transfers)
    app.router.add_get("/admin/v1/requests", requests)
    return app


async def listen_admin(app: web.Application, path: Path) -> web.AppRunner:
    """Binds `path` with mode 0660 whatever the umask; a stale socket file is replaced.

    OSError if the directory is missing or not writable, or another process listens there.
    """
    if path.is_socket():
        if _in_use(path):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        path.unlink()
    runner = web.AppRunner(app, access_log=None)
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
