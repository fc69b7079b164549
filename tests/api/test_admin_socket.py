"""The admin socket: its mode, and whose it is."""

import asyncio
import logging
import socket
import stat
from pathlib import Path

import pytest
from aiohttp import web

from pdnode.api.admin import SOCKET_MODE, listen_admin


async def test_replaces_what_a_killed_process_left(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    runner = await listen_admin(web.Application(), path)
    assert stat.S_IMODE(path.stat().st_mode) == SOCKET_MODE
    await runner.cleanup()


async def test_leaves_the_socket_of_a_running_process(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        inode = path.stat().st_ino
        with pytest.raises(OSError, match="in use"):
            await listen_admin(web.Application(), path)
        assert path.stat().st_ino == inode


async def test_malformed_requests_are_refused_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "admin.sock"
    runner = await listen_admin(web.Application(), path)
    reader, writer = await asyncio.open_unix_connection(str(path))
    with caplog.at_level(logging.INFO):
        writer.write(b"POST Ev1/snapshot HTTP/1.1\r\xf4Host: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.0 400 ")
        writer.close()
    await runner.cleanup()
    assert caplog.records == []
