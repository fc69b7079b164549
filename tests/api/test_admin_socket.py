"""The admin socket: its mode, its records, and whose it is."""

import socket
import stat
from pathlib import Path

import aiohttp
import pytest

from pdnode.api.admin import SOCKET_MODE, build_admin_app, listen_admin
from pdnode.obs.records import Records


async def test_lists_records_with_its_own_mode(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    runner = await listen_admin(build_admin_app(Records()), path)
    assert stat.S_IMODE(path.stat().st_mode) == SOCKET_MODE
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
        for what in ("transfers", "requests"):
            async with session.get(f"http://node/admin/v1/{what}") as answer:
                assert await answer.json() == []
    await runner.cleanup()


async def test_replaces_what_a_killed_process_left(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    runner = await listen_admin(build_admin_app(Records()), path)
    assert stat.S_IMODE(path.stat().st_mode) == SOCKET_MODE
    await runner.cleanup()


async def test_leaves_the_socket_of_a_running_process(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        inode = path.stat().st_ino
        with pytest.raises(OSError, match="in use"):
            await listen_admin(build_admin_app(Records()), path)
        assert path.stat().st_ino == inode
