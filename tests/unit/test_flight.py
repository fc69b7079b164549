"""The phases of a request: they are never negative, and they add up to the time to first token."""

import asyncio

import pytest

from pdnode.core.grant import Grant
from pdnode.core.request import Request
from pdnode.core.slots import Slot
from pdnode.daemon.flight import Flight, Times
from pdnode.errors import PrefillLost
from pdnode.messenger.pull import Pull
from pdnode.obs.records import RequestRecord
from pdnode.types import RequestKey

REQUEST = Request(
    request_id="r",
    prompt=(1, 2, 3),
    max_tokens=2,
    min_tokens=0,
    stop_tokens=frozenset(),
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    seed=0,
)
REMOTE = Times(submitted=10.0, begun=10.5, complete=13.0, first_token=13.25, ended=15.0)


def flight(times: Times) -> Flight:
    return Flight(REQUEST, lambda: 20.0, times, on_end=lambda _: None)


async def remote_record(*, queue_s: float, prefill_s: float, drained: bool) -> RequestRecord:
    """Of a request whose pages were complete 2.5 s after its dispatch."""
    grant = Grant(
        RequestKey("b:1"), Slot(1, 0), request_stall_s=30, drained_timeout_s=10, drained=drained
    )
    outcome: asyncio.Future = asyncio.get_running_loop().create_future()
    found = flight(REMOTE)
    found.pull = Pull(grant, None, (), 2, "r", 0, outcome, queue_s=queue_s, prefill_s=prefill_s)
    return found.record()


@pytest.mark.parametrize(
    ("queue_s", "prefill_s", "drained", "wanted"),
    [
        (0.5, 1.5, True, (1.5, 0.5)),
        (0.5, 2.25, True, (2.0, 0.0)),  # the pass returned after its last page was here
        (0.5, 1.0, False, (2.0, 0.0)),  # of an earlier chunk: the last word has not come
        (0.0, 0.0, False, (2.5, 0.0)),
    ],
)
async def test_phases_of_a_remote_prefill(
    queue_s: float, prefill_s: float, drained: bool, wanted: tuple[float, float]
) -> None:
    found = await remote_record(queue_s=queue_s, prefill_s=prefill_s, drained=drained)
    assert (found.prefill_s, found.transfer_wait_s) == wanted
    assert (found.admit_s, found.prefill_queue_s, found.first_step_s) == (0.5, queue_s, 0.25)
    phases = found.prefill_queue_s + found.prefill_s + found.transfer_wait_s + found.first_step_s
    assert found.admit_s + phases == found.ttft_s == 3.25
    assert (found.decode_s, found.total_s) == (1.75, 5.0)


def test_phases_of_a_local_prefill() -> None:
    found = flight(Times(submitted=1.0, begun=1.5, first_token=3.0, ended=4.0)).record()
    assert (found.admit_s, found.prefill_s, found.ttft_s, found.decode_s) == (0.5, 1.5, 2.0, 1.0)
    assert (found.prefill_queue_s, found.transfer_wait_s, found.first_step_s) == (0.0, 0.0, 0.0)


async def test_a_request_that_fails_while_it_waits_for_pages() -> None:
    waiting = flight(Times(submitted=12.0))
    waiting.fail(PrefillLost("gone"))
    waiting.cancel("cancelled")  # too late to change anything
    found = waiting.record()
    assert (found.finish, found.admit_s, found.total_s) == ("prefill_lost", 8.0, 8.0)
    assert (found.prefill_s, found.ttft_s, found.output_tokens) == (0.0, 8.0, 0)
    with pytest.raises(PrefillLost, match="gone"):
        _ = [event async for event in waiting.events()]
