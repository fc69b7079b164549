"""The sampler: rates, what ended in the last minute, the slow transfer, the line in the log."""

import asyncio
import logging

import pytest

from pdnode.daemon import watch
from pdnode.daemon.watch import SUMMARY_S, Watch
from pdnode.obs.records import LayerTimes, RequestRecord, TransferRecord
from tests.support.busy_node import NICS, PEERS, BusyNode, busy_node
from tests.support.messenger_parts import Clock

PAGE_BYTES = 8 * 2 * 64 * 128 * 2


class World:
    def __init__(self) -> None:
        self.node: BusyNode = busy_node()
        self.clock = Clock()
        self.watch: Watch = self.node.observation.watch
        self.clock.now = self.watch.started_at
        self.watch.clock = self.clock
        self.records = self.node.observation.records

    def second(self) -> None:
        self.clock.now += 1
        self.watch.sample()

    def end_request(self, wait_s: float, *, finish: str = "length", prefill: str = "pf") -> None:
        self.records.add_request(
            RequestRecord(
                request_id=f"r-{wait_s}", prefill=prefill, finish=finish, prompt_tokens=100,
                output_tokens=3, admit_s=0.0, prefill_queue_s=0.0, prefill_s=0.1,
                transfer_wait_s=wait_s, first_step_s=0.01, ttft_s=0.11 + wait_s, decode_s=0.2,
                total_s=0.31 + wait_s, pages=7,
            )
        )  # fmt: skip

    def end_transfer(self, took_ms: int, outcome: str = "drained") -> None:
        row = LayerTimes(0, 0, 1_000, 2_000, 2_000 + took_ms * 1_000_000, 10, 1)
        self.records.add_transfer(
            TransferRecord("k", f"r-{took_ms}", "dc", outcome, 9, 1, 10, 1, 0.0, 0.1, 0.2, (row,))
        )


@pytest.fixture
async def world() -> World:
    return World()


async def test_rates_are_of_the_last_second(world: World) -> None:
    world.watch.sample()
    for _ in range(3):
        world.node.fabric.seconds += 1
        world.second()
    flow = world.watch.nics["mlx5_3"]
    assert flow.rx.now == flow.rx.peak == 100_003 * PAGE_BYTES
    assert flow.tx.now == 0
    assert len(world.watch.peers) == NICS * PEERS
    world.second()
    assert flow.rx.now == 0
    assert flow.rx.peak == 100_003 * PAGE_BYTES
    assert list(flow.rx.history)[-2:] == [flow.rx.peak, 0]


async def test_what_ended_is_counted_by_how(world: World) -> None:
    for finish in ("length", "stop", "cancelled", "abort", "stalled"):
        world.end_request(0.0, finish=finish)
    now = world.clock.now
    found = [
        world.watch.ended.get(name, now)
        for name in ("requests_done", "requests_aborted", "requests_failed")
    ]
    assert found == [2, 2, 1]
    assert world.watch.ttft.count(now) == 5
    world.node.service.rejected += 3
    world.node.pulls.figures.failures["stalled"] = 2
    world.second()
    world.second()
    assert world.watch.ended.get("rejected", world.clock.now) == 3
    assert world.watch.ended.get("transfers_failed", world.clock.now) == 2


async def test_a_slow_request_is_twice_the_median(world: World) -> None:
    world.end_request(0.3, prefill="local")
    assert world.watch.last_slow is None  # nothing was transferred
    for _ in range(9):
        world.end_request(0.1)
    world.end_request(0.29)
    assert world.watch.last_slow is not None
    assert world.watch.last_slow[0].request_id == "r-0.1"  # the first one, to have one
    world.clock.now += 5
    world.end_request(0.35)
    slow, ended_at = world.watch.last_slow
    assert (slow.request_id, slow.total_s, slow.pages) == ("r-0.35", pytest.approx(0.45), 7)
    assert slow.phases is not None
    assert slow.phases.transfer_wait_s == 0.35
    assert ended_at == world.clock.now


async def test_a_failed_transfer_is_one_to_look_at(world: World) -> None:
    for _ in range(5):
        world.end_transfer(10)
    world.end_transfer(11, "engine")
    assert world.watch.last_slow is not None
    assert world.watch.last_slow[0].outcome == "engine"
    world.end_transfer(12)
    assert world.watch.last_slow[0].outcome == "engine"
    world.end_transfer(25)
    assert world.watch.last_slow[0].total_s == pytest.approx(0.025)
    assert world.watch.transfers.count(world.clock.now) == 7
    assert world.watch.ended.get("transfers_failed", world.clock.now) == 1


async def test_the_log_says_how_busy_it_is_and_nothing_when_idle(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdnode.daemon.watch")
    for _ in range(25):
        world.second()
    assert caplog.records == []
    world.node.observation.metrics.tokens_out += 500
    world.node.observation.metrics.tokens_in += 50
    for _ in range(25):
        world.second()
    [record] = caplog.records
    assert record.code == "node.busy"  # type: ignore[attr-defined]
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["output_tokens_per_s"] == 500 / SUMMARY_S
    assert fields["prompt_tokens_per_s"] == 50 / SUMMARY_S
    await world.node.take(4)
    for _ in range(25):
        world.second()
    assert len(caplog.records) >= 3  # open requests are something to say, tokens or none
    assert caplog.records[-1].fields["waiting"] == 4  # type: ignore[attr-defined]


async def test_a_sample_that_fails_is_reported_and_not_the_last_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SAMPLE_S", 0.01)
    samples = 0

    def sample() -> None:
        nonlocal samples
        samples += 1
        if samples == 1:
            raise OSError("a counter is gone")

    world.watch.sample = sample  # type: ignore[method-assign]
    faults: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(str(context["exception"])))
    task = asyncio.create_task(world.watch.run())
    async with asyncio.timeout(30):
        while samples < 3:
            await asyncio.sleep(0.01)
    task.cancel()
    assert faults == ["a counter is gone"]
