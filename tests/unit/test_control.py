"""What the node says to an operator: refusals, repeated actions, conditions for the warnings."""

import logging
from collections.abc import Iterator

import pytest

from pdnode.api.admin_actions import ActionRefused, Cancel, Drain, SetLogLevel, Undrain
from pdnode.core.request import Request
from tests.support.busy_node import BusyNode, busy_node


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
