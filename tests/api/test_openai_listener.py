"""Limits of the listener over real sockets: bodies, heads, connections, silent clients."""

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from pdnode.api.limits import Timeouts
from pdnode.api.listener import ApiListener
from pdnode.config import ApiConfig
from pdnode.core.request import TokenEvent
from tests.support.fake_service import Bench, serve, tokens

COMPLETION = {"model": "tiny", "prompt": "hi"}
WAIT_S = 5.0


async def exchange(bench: Bench, data: bytes) -> bytes:
    """Everything that comes back for `data` until the server closes."""
    reader, writer = await asyncio.open_connection(bench.host, bench.port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), WAIT_S)
    finally:
        writer.close()


def error_of(answer: bytes) -> dict[str, object]:
    body = answer.split(b"\r\n\r\n", 1)[1]
    error: dict[str, object] = msgspec.json.decode(body)["error"]
    return error


async def test_unknown_routes_and_methods() -> None:
    async with serve() as bench:
        async with bench.client.get(bench.url + "/v1/nowhere") as response:
            assert response.status == 404
            assert (await response.json())["error"] == {
                "message": "unknown route GET /v1/nowhere",
                "type": "invalid_request_error",
                "param": None,
                "code": "unknown_url",
            }
        async with bench.client.get(bench.url + "/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert response.headers["Server"] == "pdnode"
            assert (await response.json())["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large(chunked: bool) -> None:
    async with serve(max_body_bytes=1000) as bench:
        data = b"x" * 2000

        async def parts() -> AsyncIterator[bytes]:
            yield data

        async with bench.client.post(
            bench.url + "/v1/completions",
            data=parts() if chunked else data,
            headers={"Content-Type": "application/json"},
        ) as response:
            assert response.status == 413
            error = (await response.json())["error"]
        assert error["code"] == "body_too_large"
        assert "1000" in error["message"]
        assert bench.service.requests == []


async def test_a_body_that_does_not_arrive() -> None:
    async with serve(timeouts=Timeouts(body_s=0.1, refused_s=0.5)) as bench:
        reader, writer = await asyncio.open_connection(bench.host, bench.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 50\r\n\r\n{"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        writer.close()
    assert head.startswith(b"HTTP/1.1 408 ")


async def test_a_head_that_does_not_arrive_ends_the_connection() -> None:
    async with serve(timeouts=Timeouts(idle_s=0.1, refused_s=0.5)) as bench:
        assert await exchange(bench, b"POST /v1/comp") == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"\r\n\x00\xff nonsense \r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n"
        + b"".join(b"X-%d: 1\r\n" % number for number in range(500))
        + b"\r\n",
    ],
    ids=["tls", "garbage", "long header", "long line", "many headers"],
)
async def test_malformed_heads_are_refused_quietly(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as bench:
        with caplog.at_level(logging.INFO):
            answer = await exchange(bench, data)
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert caplog.records == []
        assert (await bench.get("/health"))[0] == 200


async def test_connections_beyond_the_limit_are_refused_in_words() -> None:
    async with serve(max_connections=3) as bench:
        held = [await asyncio.open_connection(bench.host, bench.port) for _ in range(3)]
        request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        answer = await exchange(bench, request)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in answer
        assert error_of(answer)["message"] == "too many connections"
        assert (bench.listener.open, bench.listener.refused) == (3, 1)
        held[0][1].close()
        async with asyncio.timeout(WAIT_S):
            while bench.listener.open == 3:
                await asyncio.sleep(0.005)
        assert (await bench.get("/health"))[0] == 200
        for _, writer in held:
            writer.close()


async def test_the_limit_leaves_descriptors_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (100, 100)
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: limits)
    async with serve(max_connections=4096) as bench:
        held = [await asyncio.open_connection(bench.host, bench.port) for _ in range(50)]
        assert (await exchange(bench, b"GET /health HTTP/1.1\r\n")).startswith(b"HTTP/1.1 503 ")
        for _, writer in held:
            writer.close()


async def test_a_burst_of_connections_leaves_the_node_serving() -> None:
    """10,000 connections in bursts, most of them left without a word."""
    async with serve(max_connections=64) as bench:
        for _ in range(50):
            sockets = [socket.socket() for _ in range(200)]
            for each in sockets:
                each.setblocking(False)
                each.connect_ex((bench.host, bench.port))
            await asyncio.sleep(0)
            for each in sockets[::2]:
                each.close()
            await asyncio.sleep(0)
            for each in sockets[1::2]:
                each.close()
        async with asyncio.timeout(WAIT_S):
            while bench.listener.open:
                await asyncio.sleep(0.01)
        assert bench.listener.refused > 1000
        status, _, answer = await bench.post("/v1/completions", COMPLETION)
        assert status == 200
        assert isinstance(answer, dict)
        assert answer["choices"][0]["text"] == "hi"


async def test_many_requests_at_once() -> None:
    async with serve() as bench:
        bench.service.script = tokens("abc")
        answers = await asyncio.gather(
            *(bench.post("/v1/completions", COMPLETION) for _ in range(200))
        )
        assert {status for status, _, _ in answers} == {200}
        assert len({request.request_id for request in bench.service.requests}) == 200


async def test_a_client_that_does_not_read_is_given_up() -> None:
    """Its pages would be held for ever otherwise."""
    async with serve(
        timeouts=Timeouts(write_s=0.2, refused_s=0.5), pieces={260: b"x" * 100_000}
    ) as bench:
        bench.service.script = [TokenEvent(260, 0.0, None)] * 2000
        reader, writer = await asyncio.open_connection(bench.host, bench.port)
        data = msgspec.json.encode({**COMPLETION, "stream": True})
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(data) + data
        )
        await asyncio.wait_for(bench.service.submitting.wait(), WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while not bench.service.generations:
                await asyncio.sleep(0)
            await bench.service.generations[0].cancelled.wait()
        assert bench.service.generations[0].cancels == ["abort"]
        assert bench.service.generations[0].delivered < 2000
        del reader
        writer.close()


async def test_a_taken_port_is_an_error() -> None:
    async with serve() as bench:
        second = ApiListener(web.Application(), ApiConfig(host=bench.host, port=bench.port))
        with pytest.raises(OSError, match="address already in use"):
            await second.start()


async def test_stopping_ends_running_handlers() -> None:
    async with serve(timeouts=Timeouts(refused_s=0.1)) as bench:
        bench.service.script = [*tokens("a", None), asyncio.Event()]
        request = asyncio.create_task(bench.post("/v1/completions", COMPLETION))
        async with asyncio.timeout(WAIT_S):
            while not bench.service.generations:
                await asyncio.sleep(0)
        await bench.listener.stop()
        assert bench.service.generations[0].cancels == ["abort"]
        with pytest.raises(Exception, match=r"[Dd]isconnected"):
            await request
