"""Frames and descriptors over a real socket pair, both kinds of end."""

import asyncio
import fcntl
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from pdnode.memory.handover import (
    MAX_FDS,
    FrameError,
    FrameStream,
    close_fds,
    receive_frame,
    send_frame,
)

LIMIT = 32 << 20
WAIT_S = 20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


def pipe_with(text: bytes) -> int:
    """The reading end of a pipe that holds `text`: tells one descriptor from another."""
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    return reader


def contents(fds: list[int]) -> list[bytes]:
    found = [os.read(fd, 100) for fd in fds]
    close_fds(fds)
    return found


def test_blocking_ends_pass_large_frames_and_descriptors(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    payload = random.Random(1).randbytes(9 << 20)
    fds = [pipe_with(b"one"), pipe_with(b"two")]

    def send() -> None:
        send_frame(ours, b"", max_bytes=LIMIT)
        send_frame(ours, payload, fds, max_bytes=LIMIT)
        send_frame(ours, b"last", max_bytes=LIMIT)
        ours.close()

    sender = threading.Thread(target=send)
    sender.start()
    first = receive_frame(theirs, max_bytes=LIMIT)
    second = receive_frame(theirs, max_bytes=LIMIT)
    third = receive_frame(theirs, max_bytes=LIMIT)
    assert receive_frame(theirs, max_bytes=LIMIT) is None
    sender.join(WAIT_S)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.payload, first.fds) == (b"", [])
    assert second.payload == payload
    assert (third.payload, third.fds) == (b"last", [])
    for fd in second.fds:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert contents(second.fds) == [b"one", b"two"]
    close_fds(fds)


async def test_descriptors_reach_their_frame_when_frames_arrive_in_one_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Sent before anyone reads: the first read starts with frames that have no descriptors."""
    ours, theirs = pair
    fds = [pipe_with(b"a"), pipe_with(b"b"), pipe_with(b"c")]
    send_frame(ours, b"plain", max_bytes=LIMIT)
    send_frame(ours, b"with two", fds[:2], max_bytes=LIMIT)
    send_frame(ours, b"plain again", max_bytes=LIMIT)
    send_frame(ours, b"with one" * 3000, fds[2:], max_bytes=LIMIT)
    send_frame(ours, b"end", max_bytes=LIMIT)
    stream = FrameStream(theirs, max_bytes=LIMIT)
    frames = []
    for _ in range(5):
        frame = await asyncio.wait_for(stream.receive(), WAIT_S)
        assert frame is not None
        frames.append((frame.payload[:12], contents(frame.fds)))
    assert frames == [
        (b"plain", []),
        (b"with two", [b"a", b"b"]),
        (b"plain again", []),
        (b"with onewith", [b"c"]),
        (b"end", []),
    ]
    stream.close()
    close_fds(fds)


async def test_streams_pass_large_frames_both_ways(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left = FrameStream(pair[0], max_bytes=LIMIT)
    right = FrameStream(pair[1], max_bytes=LIMIT)
    payload = random.Random(2).randbytes(11 << 20)
    fd = pipe_with(b"x")
    sends = asyncio.gather(left.send(payload, [fd]), right.send(payload[::-1]))
    at_right = await asyncio.wait_for(right.receive(), WAIT_S)
    at_left = await asyncio.wait_for(left.receive(), WAIT_S)
    await asyncio.wait_for(sends, WAIT_S)
    assert at_right is not None
    assert at_left is not None
    assert at_right.payload == payload
    assert at_left.payload == payload[::-1]
    assert contents(at_right.fds) == [b"x"]
    left.close()
    assert await asyncio.wait_for(right.receive(), WAIT_S) is None
    right.close()
    close_fds([fd])


async def test_nobody_taking_a_frame_closes_its_descriptors(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader, writer = os.pipe()
    send_frame(pair[0], b"whole", [reader], max_bytes=LIMIT)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", reader))]
    pair[0].sendmsg([struct.pack("<I", 10) + b"half"], rights)
    stream = FrameStream(pair[1], max_bytes=LIMIT)
    frame = await asyncio.wait_for(stream.receive(), WAIT_S)
    assert frame is not None
    assert len(os.listdir("/proc/self/fd")) == before + 4
    close_fds(frame.fds)
    send_frame(pair[0], b"123456", [reader], max_bytes=LIMIT)
    stream.close()
    close_fds([reader, writer])
    # Less than at first: the stream's end of the pair is closed with it.
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_frames_over_the_limit_are_not_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(FrameError, match="frame of 101 bytes, limit 100"):
        send_frame(pair[0], bytes(101), max_bytes=100)


def test_frames_over_the_limit_are_not_read(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(struct.pack("<I", 101))
    with pytest.raises(FrameError, match="frame of 101 bytes, limit 100"):
        receive_frame(pair[1], max_bytes=100)


async def test_a_stream_refuses_frames_over_the_limit(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    stream = FrameStream(pair[1], max_bytes=100)
    pair[0].sendall(struct.pack("<I", 2**32 - 1))
    with pytest.raises(FrameError, match="frame of 4294967295 bytes, limit 100"):
        await asyncio.wait_for(stream.receive(), WAIT_S)
    stream.close()


async def test_a_stream_holds_no_more_frames_than_allowed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    stream = FrameStream(pair[1], max_bytes=100, max_waiting=3)
    for _ in range(4):
        send_frame(pair[0], b"x", max_bytes=100)
    for _ in range(3):
        assert await asyncio.wait_for(stream.receive(), WAIT_S) == (b"x", [])
    with pytest.raises(FrameError, match="3 frames wait"):
        await asyncio.wait_for(stream.receive(), WAIT_S)
    stream.close()


def test_a_stream_cut_inside_a_frame_is_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].sendall(struct.pack("<I", 10) + b"half")
    pair[0].close()
    with pytest.raises(FrameError, match="ended after 4 of 10 bytes"):
        receive_frame(pair[1], max_bytes=100)


async def test_an_asyncio_stream_cut_inside_a_frame_is_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    stream = FrameStream(pair[1], max_bytes=100)
    pair[0].sendall(struct.pack("<I", 10) + b"half")
    pair[0].close()
    with pytest.raises(FrameError, match="inside a frame, after 8 bytes"):
        await asyncio.wait_for(stream.receive(), WAIT_S)
    stream.close()


def test_too_many_descriptors_are_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fds = [0] * (MAX_FDS + 8)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
    pair[0].sendmsg([struct.pack("<I", 0)], rights)
    with pytest.raises(FrameError, match=f"more than {MAX_FDS} descriptors"):
        receive_frame(pair[1], max_bytes=100)
    assert len(os.listdir("/proc/self/fd")) == before
