"""Two real nodes, seen and told over their admin sockets."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from pdnode.obs.metrics_table import TABLE
from pdnode.obs.snapshot import decode
from tests.support.admin import Admin, admin_of, pdnode
from tests.support.nodes import (
    Client,
    NodeSpec,
    RunningNode,
    clients,
    nodes,
    requests,
    transfers,
)

pytestmark = pytest.mark.timeout(300)

PROMPT = list(range(1, 200))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
# Metrics that two nodes on loopback without faults do not move: the interface has no link speed,
# and what it counts is not what a NIC carried (tests/api/test_metrics.py drives those).
STILL = {
    "pdnode_kv_transfer_failures_total",
    "pdnode_fences_total",
    "pdnode_nic_returns_total",
    "pdnode_detours_total",
    "pdnode_nic_wire_bytes_total",
    "pdnode_nic_wire_errors_total",
    "pdnode_nic_link_speed_bytes_per_second",
    "pdnode_local_prefills_total",
    "pdnode_warning",
    "pdnode_kv_staged_bytes_total",  # of pages on a GPU (tests/cuda)
}


class Duo(NamedTuple):
    prefill: RunningNode
    decode: RunningNode
    client: Client  # of the decode node
    prefill_client: Client
    at_prefill: Admin
    at_decode: Admin


def pair(model: Path, folder: Path) -> tuple[NodeSpec, NodeSpec]:
    prefill = NodeSpec("pf", "prefill", model, folder)
    decode = NodeSpec("dc", "decode", model, folder, (prefill,))
    decode.engine = {"max_running": 8, "device": "auto"}
    decode.env = {"CUDA_VISIBLE_DEVICES": ""}  # so that "auto" takes the CPU on any host
    return prefill, decode


@contextlib.asynccontextmanager
async def seen_through(running: list[RunningNode]) -> AsyncIterator[Duo]:
    prefill, decoding = (node.spec for node in running)
    async with (
        clients(prefill, decoding) as (prefill_client, client),
        admin_of(prefill.admin) as at_prefill,
        admin_of(decoding.admin) as at_decode,
    ):
        await prefill_client.wait_ready(running[0])
        await client.wait_ready(running[1])
        yield Duo(*running, client, prefill_client, at_prefill, at_decode)


@pytest.fixture(scope="module")
def shared(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RunningNode]]:
    """For tests that leave the nodes idle and as they were configured."""
    with nodes(*pair(tiny_model, tmp_path_factory.mktemp("observe"))) as running:
        yield running


@pytest.fixture
async def duo(shared: list[RunningNode]) -> AsyncIterator[Duo]:
    async with seen_through(shared) as found:
        yield found


@pytest.fixture
async def fresh(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Duo]:
    """Nodes that have done nothing yet."""
    with nodes(*pair(tiny_model, tmp_path)) as running:
        async with seen_through(running) as found:
            yield found


async def begin_long(duo: Duo, request_id: str) -> "asyncio.Task[tuple[int, dict[str, object]]]":
    """A request that runs for long enough to be looked at, with its first token there."""

    async def ask() -> tuple[int, dict[str, object]]:
        body = {
            "model": "test-model", "prompt": PROMPT, "max_tokens": 1800, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        url = f"{duo.client.spec.url}/v1/completions"
        headers = {"x-request-id": request_id, "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        async with duo.client.session.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    task = asyncio.create_task(ask())
    await duo.at_decode.until(lambda seen: any(one.output_tokens for one in seen.requests))
    return task


async def test_the_snapshot_shows_what_happened(fresh: Duo) -> None:
    for length in (2, 17, 199):
        await fresh.client.complete(PROMPT[:length], 5)
    seen = await fresh.at_decode.until(
        lambda one: (
            (one.summary is not None and one.summary.requests_done == 3)
            and one.transfers_inflight == 0
        )
    )
    assert (seen.node.id, seen.node.role, seen.node.state) == ("dc", "decode", "serving")
    assert seen.ready
    assert seen.warnings == ()
    assert seen.model.device == "cpu"
    assert seen.model.device_reason.startswith("no CUDA: ")
    assert seen.pages is not None
    assert seen.pages.free == seen.pages.total > 0
    assert seen.summary is not None
    assert seen.summary.transfers.count == 3
    assert seen.latency is not None
    assert seen.latency.ttft.count == 3
    assert seen.latency.itl.count == 3 * 4
    [peer] = seen.peers
    assert (peer.name, peer.node, peer.role, peer.state) == ("pf", "pf", "prefill", "up")
    assert peer.rtt_s is None or peer.rtt_s > 0
    # What landed at the NIC: 1, 1 and 13 pages of 4 layers.
    page_bytes = seen.model.kv_bytes_per_token * 16  # type: ignore[operator]
    metrics = await fresh.client.metrics()
    landed = metrics['pdnode_nic_bytes_total{direction="received",nic="lo"}']
    assert landed == (1 + 1 + 13) * page_bytes
    sent = await fresh.prefill_client.metrics()
    assert sent['pdnode_nic_bytes_total{direction="sent",nic="lo"}'] == landed
    there = await fresh.at_prefill.until(
        lambda one: one.summary is not None and one.summary.transfers.count == 3
    )
    assert there.latency is None
    assert there.last_slow is not None
    assert [mark.layer for mark in there.last_slow.layers] == [0, 1, 2, 3]
    for mark in there.last_slow.layers:
        assert mark.raised_us is not None
        assert mark.posted_us is not None
        assert mark.done_us is not None
        assert mark.raised_us <= mark.posted_us <= mark.done_us


async def test_a_running_request_is_seen_and_cancelled(duo: Duo) -> None:
    task = await begin_long(duo, "find-me")
    seen = await duo.at_decode.snapshot()
    [request] = seen.requests
    assert request.request_id.startswith("find-me-")
    assert (request.state, request.peer, request.prompt_tokens) == ("running", "pf", 199)
    assert seen.requests_open == 1
    assert {one.name: one.now for one in seen.queues}["running"] == 1
    ran = await pdnode("cancel", "find-me", "--socket", str(duo.decode.spec.admin), "--json")
    assert (ran.code, ran.err) == (0, "")
    assert msgspec.json.decode(ran.out) == {
        "done": True,
        "text": f"{request.request_id}: cancelled while running",
    }
    status, body = await task
    assert status == 499
    assert body["error"]["code"] == "cancelled"  # type: ignore[index]
    ended = await duo.at_decode.until(lambda one: one.requests_open == 0)
    assert ended.summary is not None
    assert ended.summary.requests_aborted >= 1
    await duo.client.wait_no_pages()
    refused = await duo.at_decode.post("cancel", {"request_id": "find-me"})
    assert refused == (404, False, "request_id: no open request has it")
    refused = await duo.at_prefill.post("cancel", {"request_id": request.request_id})
    assert refused.status == 409
    # One id and one trace in the logs of both nodes.
    for node, codes in (
        (duo.decode, ("request.admitted", "request.ended")),
        (duo.prefill, ("transfer.accepted", "transfer.ended")),
    ):
        for code in codes:
            found = re.search(rf"code={code} .*req={request.request_id} .*", node.text())
            assert found is not None, (node.spec.name, code)
            assert f"trace_id={TRACE}" in found[0]


async def test_drain_lets_work_finish_and_undrain_takes_it_again(duo: Duo) -> None:
    task = await begin_long(duo, "slow")
    socket = str(duo.decode.spec.admin)
    ran = await pdnode("drain", "--socket", socket, "--timeout-s", "0")
    assert ran.code == 75
    assert "draining goes on: 1 requests" in ran.err
    status, _, _ = await duo.client.post([1, 2, 3], 1)
    assert status == 503
    seen = await duo.at_decode.snapshot()
    assert (seen.node.state, seen.ready) == ("draining", False)
    assert [one.code for one in seen.warnings] == ["W102"]
    offered = {one.name: one.refused for one in seen.actions}
    assert offered["drain"] == "draining already"
    assert offered["undrain"] is None
    ran = await pdnode("drain", "--socket", socket, "--timeout-s", "60")
    assert (ran.code, ran.out) == (0, "drained: nothing is left\n")
    status, body = await task
    assert status == 200
    assert body["usage"]["completion_tokens"] == 1800  # type: ignore[index]
    ran = await pdnode("undrain", "--socket", socket)
    assert (ran.code, ran.out) == (0, "takes work again\n")
    await duo.client.complete([1, 2, 3], 1)


async def test_a_draining_prefill_is_not_chosen(duo: Duo) -> None:
    assert (await duo.at_prefill.post("drain")).done
    seen = await duo.at_decode.until(lambda one: one.peers[0].state == "drain")
    assert [one.code for one in seen.warnings] == ["W103"]
    status, _, _ = await duo.client.post([1, 2, 3], 1)
    assert status == 503
    assert (await duo.at_prefill.post("undrain")).done
    await duo.at_decode.until(lambda one: one.ready)
    await duo.client.complete([1, 2, 3], 1)


async def test_events_go_on_from_a_cursor(duo: Duo) -> None:
    first = await duo.at_decode.events(0, 4)
    assert [one.cursor for one in first] == [1, 2, 3, 4]
    assert first[0].code == "api.listening"
    last = (await duo.at_decode.snapshot()).events[-1].cursor
    waiting = asyncio.create_task(duo.at_decode.events(last, 1))
    assert (await duo.at_decode.post("log-level", {"level": "info"})).done
    [found] = await waiting
    assert (found.cursor, found.code) == (last + 1, "admin.done")
    assert 'result="log level info"' in found.text
    [again] = await duo.at_decode.events(-1, 1, headers={"Last-Event-ID": str(last)})
    assert again == found


async def test_reload_takes_what_can_be_changed_and_names_what_cannot(duo: Duo) -> None:
    spec = duo.decode.spec
    config, socket = spec.folder / "dc.toml", str(spec.admin)
    before = config.read_text()
    config.write_text(before.replace("max_running = 8", "max_running = 9\nmax_waiting = 0"))
    ran = await pdnode("reload", "--socket", socket)
    assert (ran.code, ran.out) == (0, "reloaded: engine.max_running, engine.max_waiting\n")
    status, _, _ = await duo.client.post([1, 2, 3], 1)
    assert status == 429
    seen = await duo.at_decode.snapshot()
    assert {one.name: one.limit for one in seen.queues}["running"] == 9
    config.write_text(before.replace("page_tokens = 16", "page_tokens = 32"))
    ran = await pdnode("reload", "--socket", socket)
    assert ran.code == 78
    assert "need a restart, so nothing was changed: kv.page_tokens" in ran.err
    seen = await duo.at_decode.snapshot()
    assert [one.code for one in seen.warnings] == ["W110"]
    config.write_text(before + "nonsense = 1\n")
    ran = await pdnode("reload", "--socket", socket)
    assert ran.code == 78
    assert "unknown key" in ran.err
    config.write_text(before)
    assert (await pdnode("reload", "--socket", socket)).code == 0
    assert (await duo.at_decode.snapshot()).warnings == ()
    await duo.client.complete([1, 2, 3], 1)


async def test_reload_follows_the_list_of_prefill_peers(duo: Duo) -> None:
    config = duo.decode.spec.folder / "dc.toml"
    before = config.read_text()
    dead = '[[prefill]]\nname = "dead"\naddress = "127.0.0.1:1"\n'
    config.write_text(before.replace('"pf"', '"other"') + dead)
    assert (await duo.at_decode.post("reload")).done
    seen = await duo.at_decode.until(
        lambda one: one.ready and "W202" in {each.code for each in one.warnings}
    )
    found = {one.name: (one.node, one.state) for one in seen.peers}
    assert found == {"other": ("pf", "up"), "dead": ("", "connecting")}
    [lost] = [one for one in seen.warnings if one.code == "W202"]
    assert lost.subjects == ("dead",)
    await duo.client.complete([1, 2, 3], 1)
    config.write_text(before)
    assert (await duo.at_decode.post("reload")).done
    seen = await duo.at_decode.until(lambda one: one.ready and not one.warnings)
    assert [(one.name, one.node) for one in seen.peers] == [("pf", "pf")]
    await duo.client.complete([1, 2, 3], 1)


async def test_status_is_the_snapshot_and_a_dead_socket_is_69(duo: Duo, tmp_path: Path) -> None:
    socket = str(duo.decode.spec.admin)
    ran = await pdnode("status", "--socket", socket, "--json")
    assert ran.code == 0
    assert decode(ran.out).node.id == "dc"
    ran = await pdnode("status", "--socket", socket)
    assert ran.code == 0
    assert ran.out.startswith("dc  decode  serving, ready, up ")
    assert "peer pf: prefill, up" in ran.out.splitlines()
    assert "\ndevice cpu: no CUDA: " in ran.out
    ran = await pdnode("status", "--socket", str(tmp_path / "none.sock"))
    assert ran.code == 69
    assert "no daemon answers on" in ran.err


async def test_every_metric_of_two_nodes_moves(fresh: Duo) -> None:
    for _ in range(2):
        await fresh.client.complete(PROMPT, 5)
    assert (await fresh.client.post([1], 0))[0] == 400
    await fresh.client.complete([1, 2], 1, no_such_field=1)
    await fresh.at_decode.until(lambda one: one.transfers_inflight == 0 and one.requests_open == 0)
    await fresh.at_prefill.until(lambda one: one.transfers_inflight == 0)
    found = [await one.metrics() for one in (fresh.client, fresh.prefill_client)]
    moved = {
        re.split(r"[{]", name)[0] for samples in found for name, number in samples.items() if number
    }
    absent = {
        name for name in TABLE if not {name, f"{name}_count", name.removesuffix("_total")} & moved
    }
    # Gauges of what is under way are 0 again; the tests above and tests/api drive them.
    gone = {name for name in absent if TABLE[name].kind == "gauge"}
    assert absent - gone <= STILL | {
        "pdnode_recomputed_total", "pdnode_requests_rejected_total", "pdnode_nic_errors_total",
        "pdnode_telemetry_dropped_total", "pdnode_kv_immediates_total",
        "pdnode_kv_pages_verified_total", "pdnode_kv_mismatches_total",
    }  # fmt: skip
    samples = found[0]
    model = 'engine="0",model_name="test-model"'
    [[ttft_s, count]] = [
        [samples[f"vllm:time_to_first_token_seconds_{end}{{{model}}}"] for end in ("sum", "count")]
    ]
    phases = [
        number
        for name, number in samples.items()
        if name.startswith("pdnode_request_phase_seconds_sum")
    ]
    assert count == 3
    assert len(phases) == 6
    assert abs(sum(phases) - ttft_s) / count < 0.02  # hand-over between loop turns, on a busy host


async def test_records_of_both_nodes_agree(duo: Duo) -> None:
    known = len(await transfers(duo.prefill.spec))
    await duo.client.complete(PROMPT, 3)
    await duo.at_prefill.until(lambda one: one.transfers_inflight == 0)
    found = await transfers(duo.prefill.spec)
    assert len(found) == known + 1
    transfer, request = found[-1], (await requests(duo.decode.spec))[-1]
    assert transfer.request_id == request.request_id
    assert (transfer.pages, request.pages, transfer.tokens) == (13, 13, 198)
    parts = (
        request.admit_s + request.prefill_queue_s + request.prefill_s + request.transfer_wait_s
        + request.first_step_s
    )  # fmt: skip
    assert abs(parts - request.ttft_s) < 1e-3
    assert request.transfer_wait_s > -1e-3


async def test_the_examples_of_the_operations_guide_work(duo: Duo) -> None:
    guide = Path(__file__).parents[2] / "docs" / "operations.md"
    section = guide.read_text().partition("## The admin socket")[2]
    block = section.partition("```sh\n")[2].partition("```")[0]
    commands = [line for line in block.splitlines() if line and not line.startswith("#")]
    assert len(commands) >= 10
    for command in commands:
        assert command.startswith("curl ")
        process = await asyncio.create_subprocess_shell(
            command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "SOCKET": str(duo.decode.spec.admin)},
        )
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        assert process.returncode == 0, (command, err)
        assert out, command
        if " -X POST" in command:
            assert msgspec.json.decode(out)["done"], (command, out)
    assert (await duo.at_decode.until(lambda one: one.ready)).node.state == "serving"
