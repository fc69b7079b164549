"""The admin socket: its mode, and whose it is."""

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
