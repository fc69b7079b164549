"""The admin routes over a real unix socket: idempotency, refusals, the event stream, the mode."""

import asyncio
import logging
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from pdnode.api import admin as admin_module
from pdnode.api.admin import MAX_STREAMS, SettingValue, build_admin_app, listen_admin
from pdnode.api.admin_actions import MAX_KEYS, Action, ActionRefused, Cancel
from pdnode.obs.events import EventRing
from pdnode.obs.log import event
from pdnode.obs.records import Records
from pdnode.obs.snapshot import Model, Node, Snapshot, encode
from tests.support.admin import Admin, admin_of


class FakeNode:
    """Remembers what it was told; refuses to cancel the request `gone`."""

    def __init__(self) -> None:
        self.told: list[Action] = []
        self.held: asyncio.Event | None = None

    async def act(self, action: Action) -> str:
        self.told.append(action)
        number = len(self.told)
        if self.held is not None:
            await self.held.wait()
        if action == Cancel(request_id="gone"):
            raise ActionRefused(404, "no such request")
        return f"number {number}"

    def snapshot(self) -> bytes:
        node = Node(id="n", boot="b", role="decode", state="serving", version="1", uptime_s=2.0)
        model = Model(name="m")
        return encode(Snapshot(protocol=1, time_s=3.0, node=node, model=model, ready=True))

    def settings(self) -> list[SettingValue]:
        return [SettingValue("node.log_level", '"info"', "default", True)]

    def log_level(self) -> str:
        return "info"


class Bench:
    def __init__(self, node: FakeNode, events: EventRing, path: Path, client: Admin) -> None:
        self.node = node
        self.events = events
        self.path = path
        self.client = client
        self._log = logging.getLogger("tests.admin")
        self._log.propagate = False
        self._log.setLevel(logging.INFO)
        self._log.handlers = [events]

    def happen(self, code: str) -> None:
        event(self._log, logging.WARNING, code, "it happened", peer="pf-1")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    node, events = FakeNode(), EventRing()
    path = tmp_path / "admin.sock"
    old = os.umask(0o077)
    try:
        runner = await listen_admin(build_admin_app(node, Records(), events), path)
    finally:
        os.umask(old)
    try:
        async with admin_of(path) as client:
            yield Bench(node, events, path, client)
    finally:
        await runner.cleanup()


async def test_the_socket_is_for_owner_and_group_in_spite_of_the_umask(bench: Bench) -> None:
    assert stat.S_IMODE(bench.path.stat().st_mode) == 0o660


async def test_what_can_be_read(bench: Bench) -> None:
    assert (await bench.client.snapshot()).node.id == "n"
    assert await bench.client.get("transfers") == (200, b"[]")
    assert await bench.client.get("requests") == (200, b"[]")
    assert await bench.client.get("log-level") == (200, b'{"level":"info"}')
    status, body = await bench.client.get("config")
    assert status == 200
    assert msgspec.json.decode(body) == {
        "settings": [
            {"key": "node.log_level", "value": '"info"', "origin": "default", "reload": True}
        ]
    }
    assert (await bench.client.get("nonsense"))[0] == 404


async def test_a_key_is_acted_on_once(bench: Bench) -> None:
    first = await bench.client.post("drain", key="k1")
    assert first == (200, True, "number 1")
    assert await bench.client.post("drain", {}, key="k1") == first
    assert await bench.client.post("drain", key="k2") == (200, True, "number 2")
    assert await bench.client.post("drain") == (200, True, "number 3")
    refused = await bench.client.post("cancel", {"request_id": "gone"}, key="k3")
    assert refused == (404, False, "no such request")
    assert await bench.client.post("cancel", {"request_id": "gone"}, key="k3") == refused
    assert len(bench.node.told) == 4
    other = await bench.client.post("undrain", key="k1")
    assert other.status == 422
    assert other.text.startswith("Idempotency-Key: used for Drain")
    assert len(bench.node.told) == 4


async def test_a_repeated_key_waits_for_the_first_one(bench: Bench) -> None:
    bench.node.held = asyncio.Event()
    calls = [asyncio.create_task(bench.client.post("reload", key="same")) for _ in range(3)]
    while not bench.node.told:
        await asyncio.sleep(0.01)
    calls[0].cancel()  # the client that came first leaves; the action goes on
    bench.node.held.set()
    answers = await asyncio.gather(*calls[1:])
    assert answers == [(200, True, "number 1")] * 2
    assert len(bench.node.told) == 1


async def test_keys_are_bounded(bench: Bench) -> None:
    for number in range(MAX_KEYS + 1):
        await bench.client.post("drain", key=f"k{number}")
    assert (await bench.client.post("drain", key="k1")).text == "number 2"
    assert (await bench.client.post("drain", key="k0")).text == f"number {MAX_KEYS + 2}"


@pytest.mark.parametrize(
    ("action", "body", "key", "said"),
    [
        ("cancel", None, "", "cancel: Object missing required field `request_id`"),
        ("cancel", {"request_id": 7}, "", "cancel: Expected `str`, got `int` - at `$.request_id`"),
        ("drain", {"now": True}, "", "drain: Object contains unknown field `now`"),
        ("drain", [], "", "drain: Expected `object`, got `array`"),
        ("drain", None, "no spaces", "Idempotency-Key: 1 to 128 of A-Z a-z 0-9 . _ : -"),
    ],
)
async def test_bad_input_is_named(
    bench: Bench, action: str, body: object, key: str, said: str
) -> None:
    assert await bench.client.post(action, body, key=key) == (400, False, said)
    assert bench.node.told == []


async def test_actions_are_posts_only(bench: Bench) -> None:
    status, _ = await bench.client.get("drain")
    assert status == 405


async def test_events_are_streamed_from_the_cursor_on(bench: Bench) -> None:
    for code in ("a", "b", "c"):
        bench.happen(code)
    [second, third] = await bench.client.events(1, 2)
    assert [(one.cursor, one.code) for one in (second, third)] == [(2, "b"), (3, "c")]
    assert (second.severity, second.text) == ("warning", "it happened peer=pf-1")
    waiting = asyncio.create_task(bench.client.events(3, 1))
    await asyncio.sleep(0)
    bench.happen("d")
    assert [one.code for one in await waiting] == ["d"]
    everything = await bench.client.events(99, 4)  # of another boot
    assert [one.cursor for one in everything] == [1, 2, 3, 4]


async def test_an_event_stream_keeps_its_connection_alive(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "KEEP_ALIVE_S", 0.02)
    connector = aiohttp.UnixConnector(str(bench.path))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get("http://node/admin/v1/events") as answer,
    ):
        assert await answer.content.readline() == b":\n"


async def test_bad_cursors_and_too_many_streams_are_refused(bench: Bench) -> None:
    for cursor in ("x", "-1", "9" * 30):
        status, body = await bench.client.get(f"events?cursor={cursor}")
        assert (status, msgspec.json.decode(body)["done"]) == (400, False)
    connector = aiohttp.UnixConnector(str(bench.path), limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        url = "http://node/admin/v1/events"
        streams = [await session.get(url) for _ in range(MAX_STREAMS)]
        async with session.get(url) as refused:
            assert refused.status == 503
        for stream in streams:
            stream.close()
    async with asyncio.timeout(30):  # those that left make room
        while (await bench.client.get("events?cursor=x"))[0] != 400:
            await asyncio.sleep(0.01)
