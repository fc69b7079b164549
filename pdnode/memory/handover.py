"""Frames with file descriptors over a SOCK_STREAM unix socket: both ends of the worker protocol.

A frame is a little-endian u32 length and that many bytes. Descriptors ride on a frame's first byte
(SCM_RIGHTS), are received close-on-exec, and belong to the receiver. A read may begin with bytes of
earlier frames, but the kernel ends it with the send that carried descriptors: they belong to the
last frame that starts in that read.
"""

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

MAX_FDS = 32
_HEAD = struct.Struct("<I")
_FD = struct.Struct("i")
_READ_BYTES = 256 * 1024
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * _FD.size)


class FrameError(Exception):
    """The other end broke the protocol: a frame too large, cut off, or too many descriptors."""


class Received(NamedTuple):
    """One frame's bytes and the descriptors that came with it (the receiver's to close)."""

    payload: bytes
    fds: list[int]


def _check_outgoing(payload: bytes, fds: Sequence[int], max_bytes: int) -> None:
    if len(payload) > max_bytes:
        raise FrameError(f"frame of {len(payload)} bytes, limit {max_bytes}")
    assert len(fds) <= MAX_FDS, f"{len(fds)} descriptors, limit {MAX_FDS}"


def _rights(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    if not fds:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]


def _receive(sock: socket.socket, size_bytes: int) -> Received:
    """One recvmsg. Empty payload: end of stream."""
    data, ancillary, flags, _ = sock.recvmsg(size_bytes, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(content) // _FD.size
            fds += (fd for (fd,) in _FD.iter_unpack(content[: count * _FD.size]))
    if flags & socket.MSG_CTRUNC:
        close_fds(fds)
        raise FrameError(f"more than {MAX_FDS} descriptors in one frame")
    return Received(data, fds)


def close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def send_frame(
    sock: socket.socket, payload: bytes, fds: Sequence[int] = (), *, max_bytes: int
) -> None:
    """Send one frame on a blocking socket. `fds` stay open here."""
    _check_outgoing(payload, fds, max_bytes)
    head = _HEAD.pack(len(payload))
    sent = sock.sendmsg([head, payload], _rights(fds))
    if sent < len(head) + len(payload):
        sock.sendall((head + payload)[sent:])


def receive_frame(sock: socket.socket, *, max_bytes: int) -> Received | None:
    """Receive one frame on a blocking socket; None at the end of the stream (also between frames).

    FrameError if the stream ends inside a frame or the frame is longer than `max_bytes`.
    """
    head, fds = _receive(sock, _HEAD.size)
    if not head:
        return None
    try:
        head += _receive_exactly(sock, _HEAD.size - len(head))
        (size,) = _HEAD.unpack(head)
        if size > max_bytes:
            raise FrameError(f"frame of {size} bytes, limit {max_bytes}")
        return Received(bytes(_receive_exactly(sock, size)), fds)
    except FrameError:
        close_fds(fds)
        raise


def _receive_exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        count = sock.recv_into(view[done:])
        if count == 0:
            raise FrameError(f"stream ended after {done} of {size} bytes")
        done += count
    return data


class FrameStream:
    """The asyncio end. One reader at a time; frames wait in a queue of at most `max_waiting`.

    The socket is read as its bytes arrive, so that the other end's death is seen at once.
    """

    def __init__(self, sock: socket.socket, *, max_bytes: int, max_waiting: int = 1024) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._frames: deque[Received] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: FrameError | None = None
        self._ended = False
        self._loop.add_reader(sock.fileno(), self._readable)

    async def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Send one frame. ConnectionError (BrokenPipeError …) if the other end is gone."""
        _check_outgoing(payload, fds, self._max_bytes)
        head = _HEAD.pack(len(payload))
        if fds:
            # Descriptors need sendmsg; four bytes always fit into a socket that is read.
            sent = self._sock.sendmsg([head], _rights(fds))
            assert sent == len(head), sent
            head = b""
        await self._loop.sock_sendall(self._sock, head + payload)

    async def receive(self) -> Received | None:
        """The next frame; None at the end of the stream. FrameError as in `receive_frame`."""
        assert self._waiter is None, "two readers"
        while not self._frames:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._frames.popleft()

    def take_waiting(self) -> list[Received]:
        """Everything that has arrived by now, read without waiting."""
        self._readable()
        frames = list(self._frames)
        self._frames.clear()
        return frames

    def close(self) -> None:
        """Stop reading, close the socket and every descriptor that nobody took. Idempotent."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        self._end(None)
        close_fds(self._fds)
        self._fds.clear()
        while self._frames:
            close_fds(self._frames.popleft().fds)

    def _readable(self) -> None:
        while not self._ended:
            try:
                data, fds = _receive(self._sock, _READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The other end died with unread bytes of ours; what it had sent came before this.
                self._end(None)
                return
            except (OSError, FrameError) as error:
                self._end(FrameError(str(error)))
                return
            self._fds += fds
            if not data:
                cut = f"stream ended inside a frame, after {len(self._buffer)} bytes"
                self._end(FrameError(cut) if self._buffer else None)
                return
            self._buffer += data
            self._split()

    def _split(self) -> None:
        while len(self._buffer) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._buffer)
            if size > self._max_bytes:
                self._end(FrameError(f"frame of {size} bytes, limit {self._max_bytes}"))
                return
            if len(self._frames) >= self._max_waiting:
                self._end(FrameError(f"{self._max_waiting} frames wait, and one more came"))
                return
            end = _HEAD.size + size
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            fds, self._fds = ([], self._fds) if self._buffer else (self._fds, [])
            self._frames.append(Received(payload, fds))
            self._wake()

    def _end(self, error: FrameError | None) -> None:
        if not self._ended:
            self._ended = True
            self._error = error
            if self._sock.fileno() >= 0:
                self._loop.remove_reader(self._sock.fileno())
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
