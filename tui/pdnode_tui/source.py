"""Where snapshots come from: a daemon's admin socket, a recording, or made-up nodes."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, Protocol

import aiohttp
import msgspec

from pdnode.obs.snapshot import ActionAnswer, Event, Snapshot, decode, encode
from pdnode_tui import mock

TIMEOUT_S = 1.5
ACTION_TIMEOUT_S = 30.0
MAX_BYTES = 4 << 20
"""Longest answer that is read, and longest line of a recording."""

_BASE = "http://pdnode/admin/v1"


class SourceError(Exception):
    """No snapshot, or no answer to an action; the text says why."""


class SourceEnded(Exception):
    """There will be no other snapshot."""


class Source(Protocol):
    """`follow` gives events after a cursor until the connection is lost. One call of each kind at
    a time; `aclose` at the end.
    """

    name: str
    can_act: bool

    async def fetch(self) -> bytes: ...
    def follow(self, cursor: int) -> AsyncIterator[Event]: ...
    async def act(self, action: str, body: dict[str, str], *, key: str) -> ActionAnswer: ...
    async def aclose(self) -> None: ...


def read_snapshot(data: bytes) -> Snapshot:
    """SourceError where it is none."""
    try:
        return decode(data)
    except ValueError as error:
        raise SourceError(f"not a snapshot: {error}") from error


class SocketSource:
    """The admin socket of a daemon. The session is made on first use, inside the event loop."""

    can_act = True

    def __init__(self, path: Path) -> None:
        self.name = f"unix:{path}"
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self._path))
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def fetch(self) -> bytes:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._http().get(f"{_BASE}/snapshot", timeout=timeout) as response:
                data = await _body(response)
        except (aiohttp.ClientError, OSError) as error:
            raise SourceError(_reason(error, TIMEOUT_S)) from error
        if response.status != 200:
            raise SourceError(f"HTTP {response.status} from {_BASE}/snapshot")
        return data

    async def follow(self, cursor: int) -> AsyncIterator[Event]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S)
        url = f"{_BASE}/events?cursor={cursor}"
        try:
            async with self._http().get(url, timeout=timeout) as response:
                if response.status != 200:
                    raise SourceError(f"HTTP {response.status} from {url}")
                async for line in response.content:
                    if line.startswith(b"data:"):
                        yield msgspec.json.decode(line[5:], type=Event)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise SourceError(_reason(error, TIMEOUT_S)) from error

    async def act(self, action: str, body: dict[str, str], *, key: str) -> ActionAnswer:
        timeout = aiohttp.ClientTimeout(total=ACTION_TIMEOUT_S)
        headers = {"Idempotency-Key": key}
        url = f"{_BASE}/{action}"
        try:
            async with self._http().post(
                url, json=body, headers=headers, timeout=timeout
            ) as response:
                data = await _body(response)
            return msgspec.json.decode(data, type=ActionAnswer)
        except msgspec.MsgspecError as error:
            raise SourceError(f"HTTP {response.status} from {url}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise SourceError(_reason(error, ACTION_TIMEOUT_S)) from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _body(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        data += chunk
        if len(data) > MAX_BYTES:
            raise SourceError(f"the answer is longer than {MAX_BYTES} bytes")
    return bytes(data)


def _reason(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error.strerror or error.os_error)
    return str(error) or type(error).__name__


class MockSource:
    """Made-up snapshots, one tick a fetch; "stale" gives one and then no more."""

    can_act = True

    def __init__(self, kind: str) -> None:
        self.name = f"mock:{kind}"
        self._kind = kind
        self._tick = -1

    async def fetch(self) -> bytes:
        self._tick += 1
        if self._kind == "stale" and self._tick:
            raise SourceError("Connection refused")
        return encode(mock.snapshot(self._kind, self._tick))

    async def follow(self, cursor: int) -> AsyncIterator[Event]:
        return
        yield  # what makes it a generator

    async def act(self, action: str, body: dict[str, str], *, key: str) -> ActionAnswer:
        return ActionAnswer(done=True, text=f"mock: {action} {' '.join(body.values())}".rstrip())

    async def aclose(self) -> None:
        return


class ReplaySource:
    """The snapshots of a recording, one a fetch, whatever time lay between them."""

    can_act = False

    def __init__(self, path: Path) -> None:
        """OSError where it cannot be opened."""
        self.name = f"replay:{path.name}"
        self._file: BinaryIO = path.open("rb")
        self._line = 0

    async def fetch(self) -> bytes:
        self._line += 1
        line = self._file.readline(MAX_BYTES)
        if not line:
            raise SourceEnded(f"end of the recording after {self._line - 1} snapshots")
        try:
            return bytes(msgspec.json.decode(line, type=Recorded).snapshot)
        except ValueError as error:
            raise SourceEnded(f"line {self._line} of the recording: {error}") from error

    async def follow(self, cursor: int) -> AsyncIterator[Event]:
        return
        yield  # what makes it a generator

    async def act(self, action: str, body: dict[str, str], *, key: str) -> ActionAnswer:
        raise SourceError("a recording cannot be told anything")

    async def aclose(self) -> None:
        self._file.close()


class Recorded(msgspec.Struct, frozen=True):
    """One line of a recording."""

    at_s: float  # since the recording began
    snapshot: msgspec.Raw


MAX_RECORDING_BYTES = 1 << 30


class Recorder:
    """Writes snapshots, one JSON line each, until it is closed or the file is MAX_RECORDING_BYTES
    long. OSError of any call means that nothing more is recorded."""

    def __init__(self, path: Path, now: float) -> None:
        self.path = path
        self._began = now
        self._size = 0
        self._file = path.open("xb")

    def write(self, data: bytes, now: float) -> bool:
        """False if it is full."""
        line = Recorded(round(now - self._began, 3), msgspec.Raw(data))
        encoded = msgspec.json.encode(line) + b"\n"
        self._size += len(encoded)
        if self._size > MAX_RECORDING_BYTES:
            return False
        self._file.write(encoded)
        self._file.flush()
        return True

    def close(self) -> None:
        self._file.close()
