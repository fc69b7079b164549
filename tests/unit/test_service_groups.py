"""Requests on a node of several TP groups: a new one goes where least is due, and stays."""

import asyncio
import time
from typing import Any, cast

import pytest

from pdnode.core.pages import PagePool
from pdnode.core.request import Request
from pdnode.core.schedule import Scheduler
from pdnode.daemon.engine import Engine, Group
from pdnode.daemon.flight import Flight
from pdnode.daemon.service import NodeService
from pdnode.daemon.steps import StepLoop
from pdnode.errors import BadRequest
from pdnode.messenger.gate import PageGate
from pdnode.obs.records import Records
from pdnode.types import Role, WhenNoPrefill
from tests.support.messenger_parts import geometry

PAGES, PAGE_TOKENS = 6, 4


def node() -> tuple[NodeService, Engine]:
    """A colocated node of two groups whose workers never run."""
    service = NodeService(
        role=Role.COLOCATED,
        policy=WhenNoPrefill.LOCAL,
        model_name="m",
        context_tokens=64,
        vocabulary=100,
        max_waiting=16,
        records=Records(),
        clock=time.monotonic,
    )
    groups = []
    for _ in range(2):
        scheduler = Scheduler(page_tokens=PAGE_TOKENS, chunk_tokens=16, max_running=4)
        gate = PageGate(PagePool(PAGES), max_quarantined=3)
        groups.append(Group(cast(Any, None), gate, StepLoop(scheduler, cast(Any, None))))
    engine = Engine(geometry(pages=PAGES), tuple(groups))
    service.start(groups=engine.groups)
    return service, engine


async def submit(service: NodeService, name: str, *, prompt: int, answer: int) -> Flight:
    request = Request(name, (1,) * prompt, answer, 0, frozenset(), 0.0, 0, 1.0, 0)
    flight = await service.submit(request)
    await asyncio.sleep(0)
    return flight


async def test_the_least_loaded_group_takes_the_request() -> None:
    service, engine = node()
    long = await submit(service, "a", prompt=12, answer=4)
    one = await submit(service, "b", prompt=5, answer=4)
    two = await submit(service, "c", prompt=5, answer=1)
    three = await submit(service, "d", prompt=1, answer=1)
    assert [flight.group for flight in (long, one, two, three)] == [0, 1, 1, 1]
    held = [group.gate.pool.counts.used for group in engine.groups]
    assert held == [4, 2 + 2 + 1], "the last token generated needs no place"
    assert [group.steps.scheduler.waiting for group in engine.groups] == [1, 2]
    assert [group.steps.scheduler.running for group in engine.groups] == [0, 1]
    assert (engine.page_counts.free, engine.page_counts.used) == (2 * PAGES - 9, 9)
    assert engine.waiting_tokens() == 12 + 5 + 5
    one.cancel("cancelled")
    two.cancel("cancelled")
    assert (await submit(service, "e", prompt=1, answer=1)).group == 1
    for flight in service.flights():
        flight.cancel("cancelled")
    assert engine.page_counts.free == 2 * PAGES
    assert (await submit(service, "f", prompt=1, answer=1)).group == 0, "nothing is counted twice"


async def test_a_request_must_fit_into_one_group() -> None:
    service, _ = node()
    assert service.capacity_tokens == PAGES * PAGE_TOKENS
    with pytest.raises(BadRequest, match="25 tokens of KV cache, 24 are there"):
        await submit(service, "a", prompt=20, answer=5)
