"""The admin socket of a node under test, over aiohttp and as the command line."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from pdnode.obs.snapshot import ActionAnswer, Event, Snapshot, decode

WAIT_S = 60.0


class Said(NamedTuple):
    status: int
    done: bool
    text: str


class Admin:
    """One client of one admin socket."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def get(self, route: str) -> tuple[int, bytes]:
        async with self._session.get(f"http://node/admin/v1/{route}") as answer:
            return answer.status, await answer.read()

    async def snapshot(self) -> Snapshot:
        status, body = await self.get("snapshot")
        assert status == 200, body
        return decode(body)

    async def post(self, action: str, body: object = None, *, key: str = "") -> Said:
        headers = {"Idempotency-Key": key} if key else {}
        data = b"" if body is None else json.dumps(body).encode()
        url = f"http://node/admin/v1/{action}"
        async with self._session.post(url, data=data, headers=headers) as answer:
            said = msgspec.json.decode(await answer.read(), type=ActionAnswer)
            return Said(answer.status, said.done, said.text)

    async def events(
        self, cursor: int, count: int, *, headers: Mapping[str, str] | None = None
    ) -> list[Event]:
        """The next `count` events after `cursor`; waits for them."""
        found: list[Event] = []
        url = f"http://node/admin/v1/events?cursor={cursor}" if cursor >= 0 else (
            "http://node/admin/v1/events"
        )  # fmt: skip
        async with asyncio.timeout(WAIT_S), self._session.get(url, headers=headers) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            async for line in answer.content:
                if line.startswith(b"data: "):
                    found.append(msgspec.json.decode(line[6:], type=Event))
                    if len(found) == count:
                        return found
        raise AssertionError(f"the stream ended after {len(found)} events")

    async def until(self, holds: Callable[[Snapshot], bool]) -> Snapshot:
        """The first snapshot for which `holds`."""
        deadline = time.monotonic() + WAIT_S
        while True:
            snapshot = await self.snapshot()
            if holds(snapshot):
                return snapshot
            assert time.monotonic() < deadline, snapshot
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def admin_of(path: Path) -> AsyncIterator[Admin]:
    connector = aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Admin(session)


class Ran(NamedTuple):
    code: int
    out: str
    err: str


async def pdnode(*arguments: str) -> Ran:
    """`pdnode …` to its end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdnode", *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(WAIT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())
