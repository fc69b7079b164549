"""What the node says to an operator: refusals, repeated actions, conditions for the warnings."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from pdnode.api.admin_actions import (
    ActionRefused,
    Cancel,
    ChangeRole,
    Drain,
    SetLogLevel,
    Undrain,
)
from pdnode.config import AUTO
from pdnode.core.request import Request
from pdnode.daemon.kvregion import RegionChoice
from pdnode.daemon.lifecycle import Lifecycle, Phase, Restarts
from pdnode.daemon.reload import Reloader
from pdnode.daemon.rolechange import RoleChange
from pdnode.types import RegionKind, Role, Verify, WhenNoPrefill
from tests.support.busy_node import GEOMETRY, BusyNode, busy_node


@pytest.fixture
async def node() -> BusyNode:
    return busy_node()


@pytest.fixture
def level() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


async def submit(node: BusyNode, request_id: str) -> None:
    await node.service.submit(
        Request(request_id, (1, 2, 3), 4, 0, frozenset(), 0.0, 0, 1.0, seed=1)
    )


async def refusal(node: BusyNode, action: Cancel | Undrain | SetLogLevel) -> tuple[int, str]:
    with pytest.raises(ActionRefused) as caught:
        await node.control.act(action)
    return caught.value.status, str(caught.value)


async def test_drain_and_undrain_may_be_repeated(node: BusyNode) -> None:
    assert await node.control.act(Undrain()) == "takes work already"
    await submit(node, "a-00000001")
    for _ in range(2):
        said = await node.control.act(Drain())
        assert said.startswith("draining: 1 requests")
        assert node.service.draining
    for _ in range(2):
        await node.control.act(Undrain())
        assert not node.service.draining


async def test_a_node_that_stops_is_not_undrained(node: BusyNode) -> None:
    node.control.stopping = True
    node.control.set_draining(True)
    assert await refusal(node, Undrain()) == (409, "this node is stopping")
    offered = {one.name: one.refused for one in node.control.actions()}
    assert offered["undrain"] == "this node is stopping"


async def test_cancel_finds_the_clients_id_where_it_is_unique(node: BusyNode) -> None:
    for request_id in ("one-00000001", "two-00000002", "two-00000003"):
        await submit(node, request_id)
    assert await refusal(node, Cancel("two")) == (
        409,
        "request_id: 2 requests have it: two-00000002, two-00000003",
    )
    assert await refusal(node, Cancel("on")) == (404, "request_id: no open request has it")
    assert await node.control.act(Cancel("one")) == "one-00000001: cancelled while waiting"
    assert await node.control.act(Cancel("two-00000003")) == "two-00000003: cancelled while waiting"
    assert [one.request.request_id for one in node.service.flights()] == ["two-00000002"]
    assert await refusal(node, Cancel("one")) == (404, "request_id: no open request has it")


@pytest.mark.usefixtures("level")
async def test_log_levels(node: BusyNode) -> None:
    status, text = await refusal(node, SetLogLevel("loud"))
    assert (status, text) == (400, "level: one of debug, info, warning, error")
    assert await node.control.act(SetLogLevel("error")) == "log level error"
    assert node.control.log_level() == "error"


async def test_quarantined_pages_are_a_warning_and_worse_above_the_limit(node: BusyNode) -> None:
    engine = node.observation.parts.engine
    assert engine is not None
    pool = engine.groups[0].gate.pool
    codes = [one.code for one in node.control.conditions()]
    assert codes == ["W203"]  # of its peers
    pool.quarantine(pool.reserve(1024))
    assert [one.code for one in node.control.conditions()] == ["W120", "W203"]
    pool.quarantine(pool.reserve(1))
    found = node.control.conditions()[0]
    assert found.code == "W121"
    assert found.text == "1025 pages wait for a writer's word or a fence, at most 1024 may"


async def test_pages_on_a_gpu_are_not_read_after_a_reload_either(node: BusyNode) -> None:
    """Where "auto" took the GPU's memory no rule between keys says it."""
    parts = node.observation.parts
    assert parts.engine is not None
    reloader = Reloader(parts, cast(Any, None), cast(Any, None))
    local = replace(parts.config.node, when_no_prefill=WhenNoPrefill.LOCAL)
    parts.config = replace(parts.config, node=local)
    new = replace(parts.config, peer=replace(parts.config.peer, verify=Verify.ONCE))
    assert reloader.problems(new) == []
    choice = RegionChoice(RegionKind.CUMEM, "the NICs reach the GPU's memory")
    parts.engine = replace(parts.engine, region=choice)
    (problem,) = reloader.problems(new)
    assert str(problem).startswith("peer.verify: pages in a GPU's memory cannot be read here")
    assert reloader.problems(parts.config) == []


async def test_the_rules_of_a_reload_are_those_of_the_device_that_was_taken(node: BusyNode) -> None:
    """The file says "auto" for ever; pages of 64 tokens follow from what it was at the start."""
    parts = node.observation.parts
    reloader = Reloader(parts, cast(Any, None), cast(Any, None))
    local = replace(parts.config.node, when_no_prefill=WhenNoPrefill.LOCAL)
    engine = replace(parts.config.engine, device="auto", dtype="auto", chunk_tokens=48)
    pages = replace(parts.config.kv, page_tokens=AUTO, dtype="auto")
    new = replace(parts.config, node=local, engine=engine, kv=pages)
    assert reloader.problems(new) == []
    parts.config = replace(parts.config, engine=replace(parts.config.engine, device="cuda"))
    (problem,) = reloader.problems(new)
    assert str(problem).startswith("engine.chunk_tokens: 48 is not a multiple of kv.page_tokens")


async def test_the_detour_through_host_memory_is_a_warning_with_its_price(node: BusyNode) -> None:
    parts = node.observation.parts
    assert parts.engine is not None
    assert list(parts.conditions()) == []
    choice = RegionChoice(RegionKind.STAGED, "provider tcp does not reach the memory of a GPU")
    parts.engine = replace(parts.engine, region=choice)
    figures = parts.engine.groups[0].steps.figures
    figures.fetched_pages, figures.stored_pages = 3, 2
    layers, page_bytes = GEOMETRY.layers, GEOMETRY.page_bytes
    (found,) = parts.conditions()
    assert found.code == "W140"
    assert found.text == (
        "provider tcp does not reach the memory of a GPU: each token of a prompt between nodes "
        f"costs one more copy of {layers * page_bytes // 64} bytes here, "
        f"{5 * layers * page_bytes} bytes so far"
    )
    assert parts.staged() == {"fetched": 3 * layers * page_bytes, "stored": 2 * layers * page_bytes}
    parts.config = replace(parts.config, node=replace(parts.config.node, role=Role.COLOCATED))
    assert list(parts.conditions()) == []


@pytest.fixture
def life() -> Lifecycle:
    found = Lifecycle(Restarts(5))
    found.enter(Phase.SERVING)
    return found


@pytest.fixture
def change(node: BusyNode, life: Lifecycle) -> RoleChange:
    parts = node.observation.parts
    return RoleChange(
        parts=parts, base=parts.config, control=node.control, lifecycle=life, open_work=lambda: 0
    )


async def test_a_drain_outlives_a_role_change_that_an_engine_s_end_forestalls(
    node: BusyNode, life: Lifecycle, change: RoleChange
) -> None:
    await node.control.act(Drain())
    said = await node.control.act(ChangeRole("colocated"))
    assert said.startswith("changing from")
    change.done()  # another engine serves, and no drain for the change was begun
    assert node.service.draining
    assert life.wanted is None


@pytest.mark.parametrize("asked", [False, True])
async def test_a_drain_that_is_asked_for_during_a_role_change_outlives_it(
    node: BusyNode, change: RoleChange, *, asked: bool
) -> None:
    await node.control.act(ChangeRole("colocated"))
    assert await change.drain()
    assert node.service.draining
    assert next(one.refused for one in node.control.actions() if one.name == "drain") is None
    if asked:
        assert (await node.control.act(Drain())).startswith("draining")
    change.done()
    assert node.service.draining is asked
