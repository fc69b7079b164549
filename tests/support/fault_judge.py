"""One fault under load: what became of every request, held against what is promised."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.fault_cluster import REQUEST_STALL_S, Cluster, Fault
from tests.support.fault_load import Asked, Load

STREAMS = 4  # of each decode node
NAMED = {"prefill_lost", "stalled", "unavailable"}  # what a client may be told (docs/api.md)
ANSWERED_WITHIN_S = 600.0  # of a real model on a busy machine
FLOOR = 0.99  # of requests that had no answer yet and have another way


@dataclass(frozen=True, slots=True)
class Span:
    """Of one fault: when it came, and when all was as before."""

    begun: float
    over: float


HEAD = "fault | set-up | requests | decoding | unanswered | errors | error after | lasted | pages"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    fault: str
    set_up: str
    requests: int
    decoding: str  # right / in decode when the fault came
    unanswered: str  # right / without a token then, or begun until all was as before
    errors: str
    slowest_s: float  # from the fault, or the request if that came later, to an error
    lasted_s: float
    pages: float  # compared with their digests

    def __str__(self) -> str:
        return (
            f"{self.fault} | {self.set_up} | {self.requests} | {self.decoding} | {self.unanswered}"
            f" | {self.errors or '-'} | {self.slowest_s:.1f} s | {self.lasted_s:.0f} s"
            f" | {self.pages:.0f}"
        )


async def undergo(cluster: Cluster, fault: Fault) -> Row:
    """The fault happens in the middle of a steady load. AssertionError where a promise breaks."""
    await cluster.at_rest()
    before = await cluster.pages_verified()
    processes = {name: node.process.pid for name, node in cluster.running.items()}
    load = Load(cluster.decodes, cluster.cases, STREAMS)
    load.start()
    try:
        async with asyncio.timeout(ANSWERED_WITHIN_S):
            await load.answered(2)
            await load.in_the_middle()
        begun = time.monotonic()
        await fault.happens(cluster)
        await cluster.joined()
        span = Span(begun, time.monotonic())
        async with asyncio.timeout(ANSWERED_WITHIN_S):
            await load.answered(STREAMS)
    finally:
        await load.stop()
    await cluster.at_rest()
    after = await cluster.pages_verified()
    # A node that was started anew counts from 0.
    pages = sum(after[name] - before[name] * (after[name] >= before[name]) for name in after)
    assert pages > 0
    _survived(cluster, fault, processes)
    return _judge(cluster, fault, load.asked, span, pages)


def _survived(cluster: Cluster, fault: Fault, processes: dict[str, int]) -> None:
    """Nobody restarted but who was killed, and nobody took a fault for its own."""
    for name, node in cluster.running.items():
        assert node.process.poll() is None, f"{name} has ended:\n{node.text()[-4000:]}"
        if processes[name] != node.process.pid:
            assert name == {"prefill": "p0", "decode": "d1"}[fault.hits]
        assert "Traceback" not in node.text(), node.text()[-4000:]


def _judge(cluster: Cluster, fault: Fault, asked: Sequence[Asked], span: Span, pages: float) -> Row:
    wrong = [one for one in asked if one.wrong]
    assert not wrong, [(one.node, one.prefill, one.tokens, one.case.tokens) for one in wrong]
    caught = [one for one in asked if one.ended > span.begun and one.begun < span.over]
    decoding = [one for one in caught if one.first and one.first < span.begun]
    unanswered = [one for one in caught if one not in decoding]
    failed = [one for one in caught if not one.right]
    outside = [one for one in asked if one not in caught and not one.right]
    assert not outside, [(one.error, one.begun - span.begun) for one in outside]
    _hold(cluster, fault, span, decoding=decoding, unanswered=unanswered)
    named = [one for one in failed if not _of_the_dead(fault, one)]
    return Row(
        fault.name,
        cluster.set_up.name,
        len(asked),
        _share(decoding),
        _share(unanswered),
        ", ".join(f"{count} {error}" for error, count in Counter(o.error for o in failed).items()),
        max((_until_error_s(one, span) for one in named), default=0.0),
        span.over - span.begun,
        pages,
    )


def _hold(
    cluster: Cluster,
    fault: Fault,
    span: Span,
    *,
    decoding: list[Asked],
    unanswered: list[Asked],
) -> None:
    """The success floors."""
    assert decoding, "the fault met nobody who decoded"
    harmed = [one for one in decoding if not one.right and not _of_the_dead(fault, one)]
    assert not harmed, [(one.node, one.error, len(one.tokens)) for one in harmed]
    others = [one for one in unanswered if not _of_the_dead(fault, one)]
    failed = [one for one in others if not one.right]
    if fault.hits != "prefill":
        assert not failed, [(one.node, one.error) for one in failed]
    elif cluster.set_up.helps_itself:
        assert len(failed) <= (1 - FLOOR) * len(others), [(o.node, o.error) for o in failed]
    else:
        late = [one for one in failed if _until_error_s(one, span) > REQUEST_STALL_S + 1.0]
        assert not late, [(one.error, one.begun - span.begun, one.ended) for one in late]
        assert {one.error for one in failed} <= NAMED, Counter(one.error for one in failed)


def _of_the_dead(fault: Fault, asked: Asked) -> bool:
    return fault.hits == "decode" and asked.node == "d1"


def _until_error_s(asked: Asked, span: Span) -> float:
    return asked.ended - max(asked.begun, span.begun)


def _share(asked: list[Asked]) -> str:
    return f"{sum(one.right for one in asked)}/{len(asked)}"
