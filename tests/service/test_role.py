"""Another role at run time, under load from a decode node that needs a prefill peer throughout."""

import asyncio
import json
from pathlib import Path

import pytest

from pdnode.localnodes import free_ports
from pdnode.obs.snapshot import Snapshot
from tests.support.admin import Admin, admin_of, pdnode
from tests.support.nodes import Client, NodeSpec, cluster, requests, until
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.timeout(300)

PROMPT = random_prompt(200, seed=5)


async def ask_for_ever(client: Client, answers: list[tuple[int, object]]) -> None:
    while True:
        status, body, _ = await client.post(PROMPT, 4)
        answers.append((status, body))


def peer_state(name: str, state: str):  # noqa: ANN201
    def holds(snapshot: Snapshot) -> bool:
        return any(one.name == name and one.state == state for one in snapshot.peers)

    return holds


async def test_decode_to_prefill_and_back_under_load(tiny_model: Path, tmp_path: Path) -> None:
    """`x` is a decode node, serves `d` as a prefill for a while, and is a decode node again."""
    p = NodeSpec("p", "prefill", tiny_model, tmp_path)
    x = NodeSpec("x", "decode", tiny_model, tmp_path, (p,))
    d = NodeSpec("d", "decode", tiny_model, tmp_path, (p, x), peer={"reconnect_max_s": 0.3})
    async with (
        cluster(p, x, d) as (running, (_, at_x, at_d)),
        admin_of(x.admin) as x_admin,
        admin_of(d.admin) as d_admin,
    ):
        answers: list[tuple[int, object]] = []
        load = [asyncio.create_task(ask_for_ever(at_d, answers)) for _ in range(3)]
        wanted = await at_x.tokens(PROMPT, 4)
        slow = asyncio.create_task(at_x.complete(PROMPT, 200))  # is finished before the change
        await x_admin.until(lambda one: one.requests_open == 1)

        ran = await pdnode("role", "prefill", "--socket", str(x.admin))
        assert (ran.code, ran.out) == (0, "the role is prefill\n"), ran
        assert (await slow)["usage"]["completion_tokens"] == 200
        await differs(x_admin, role="prefill")
        await at_x.wait_ready(running[1])
        await d_admin.until(peer_state("x", "up"))
        await used(d, "x", answers)
        status, body, _ = await at_x.post(PROMPT, 4)
        assert status != 200, body

        ran = await pdnode("role", "decode", "--socket", str(x.admin))
        assert ran.code == 0, ran
        await at_x.wait_ready(running[1])
        await d_admin.until(lambda one: not peer_state("x", "up")(one))
        snapshot = await x_admin.snapshot()
        assert snapshot.node.role == "decode"
        with pytest.raises(ConnectionRefusedError):  # its NICs no longer listen
            await asyncio.open_connection("127.0.0.1", x.ports[2])
        assert "W106" not in [one.code for one in snapshot.warnings]
        assert await at_x.tokens(PROMPT, 4) == wanted
        assert (await requests(x))[-1].prefill == "p"

        before = len(answers)
        await until(lambda: len(answers) > before + 3, "the load goes on")
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
        assert [body for status, body in answers if status != 200] == []
        for client in (at_x, at_d):
            await client.wait_no_pages()


async def used(d: NodeSpec, name: str, answers: list[tuple[int, object]]) -> None:
    """Some request of `d` was prefilled by `name`, since now."""
    before = len(answers)
    while not any(one.prefill == name for one in (await requests(d))[before:]):
        await asyncio.sleep(0.05)


async def differs(admin: Admin, *, role: str) -> None:
    snapshot = await admin.snapshot()
    assert snapshot.node.role == role
    [warning] = [one for one in snapshot.warnings if one.code == "W106"]
    assert warning.text == f"{role} here, decode in the file"
    status, body = await admin.get("config")
    assert status == 200
    [setting] = [one for one in json.loads(body)["settings"] if one["key"] == "node.role"]
    assert (setting["value"], setting["origin"]) == (f'"{role}"', "pdnode role")


async def test_colocated_to_decode_and_a_role_that_cannot_be_had(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Another worker is started where the transfer core comes or goes; what the file lacks for a
    role is named; a role that it has already is no change.
    """
    [taken] = free_ports(1)
    node = NodeSpec("co", "colocated", tiny_model, tmp_path, policy="local")
    node.ports[1] = taken
    async with cluster(node) as ((running,), (client,)), admin_of(node.admin) as admin:
        wanted = await client.tokens(PROMPT, 4)
        (worker,) = running.children()
        assert (await admin.post("role", {"role": "colocated"})).text == (
            "the role is colocated already"
        )
        said = await admin.post("role", {"role": "router"})
        assert (said.status, said.text) == (400, "role: one of prefill, decode, colocated")
        ran = await pdnode("role", "decode", "--socket", str(node.admin), "--json")
        assert ran.code == 0, ran
        assert running.children() != [worker]
        assert await client.tokens(PROMPT, 4) == wanted

        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", taken)
        async with server:
            ran = await pdnode("role", "prefill", "--socket", str(node.admin))
        assert ran.code == 64, ran
        assert f"port {taken} on 127.0.0.1 is taken" in ran.err
        assert (await admin.snapshot()).node.role == "decode"
        assert await client.tokens(PROMPT, 4) == wanted
