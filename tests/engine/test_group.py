"""TP groups: real processes, one per rank, that share a tiny model and answer as one."""

import asyncio
import mmap
import os
import signal
from pathlib import Path

import pytest

from pdnode.core.geometry import KvGeometry
from pdnode.engine.group import WorkerGroup
from pdnode.engine.protocol import COUNTER_OFFSET, Init, Loading, Scoring, SequenceStep, Step
from pdnode.errors import EngineDied
from pdnode.memory.region import MemfdRegion
from tests.support.local_engine import GREEDY, LocalEngine, load_model
from tests.support.tiny_model import write_tiny_llama

ENDS_WITHIN_S = 20.0
PROMPT = [3 + (7 * n) % 300 for n in range(50)]
PAGES = [5, 9, 2, 11]


def init_for(path: Path, tp: int, *, pages: int = 16) -> Init:
    return Init(str(path), "float32", 16, pages, 0, 1, 512, tp=tp, sharers=tp)


def counter_value(group: WorkerGroup, rank: int) -> int:
    with mmap.mmap(group.workers[rank].counter_fd, 4096, prot=mmap.PROT_READ) as page:
        return int.from_bytes(page[COUNTER_OFFSET : COUNTER_OFFSET + 8], "little")


def regions(group: WorkerGroup) -> list[bytes]:
    found = []
    for fd in group.region_fds:
        region = MemfdRegion.adopt(os.dup(fd), group.geometry.region_bytes)
        found.append(bytes(region.map()))
        region.close()
    return found


def head(geometry: KvGeometry, region: bytes, *, layer: int, page: int, head: int) -> bytes:
    """K and V of one of the rank's heads."""
    begin = layer * geometry.layer_stride + page * geometry.page_bytes + head * geometry.head_bytes
    return region[begin : begin + geometry.head_bytes]


async def test_ranks_have_the_pages_of_their_heads_and_draw_as_one(tmp_path: Path) -> None:
    """Four query heads and two KV heads over two ranks and over four, which hold copies."""
    path = write_tiny_llama(tmp_path, bias=True)
    local = LocalEngine(load_model(path), pages=16)
    chunks = [
        SequenceStep(1, 0, PROMPT[:32], PAGES, None),
        SequenceStep(1, 32, PROMPT[32:], [], GREEDY, Scoring(PROMPT[33:], 2)),
    ]
    whole = [local.step([chunk]) for chunk in chunks][1][0]
    memory = bytes(local.memory.numpy())
    for tp, heads in ((2, [[0], [1]]), (4, [[0], [0], [1], [1]])):
        seen: list[Loading] = []
        group = await WorkerGroup.start(init_for(path, tp), on_loading=seen.append, timeout_s=100)
        try:
            assert (group.geometry.tp, group.geometry.heads_per_rank) == (tp, 1)
            assert seen[-1].ratio == 0.95
            answers = [await group.step(Step(n, group.base, [c], [])) for n, c in enumerate(chunks)]
            assert not answers[0].drawn
            (drawn,) = answers[1].drawn
            assert drawn.token == whole.token
            assert drawn.logprob == pytest.approx(whole.logprob, abs=1e-5)
            (scored,) = answers[1].scored
            assert len(scored.logprobs) == 17
            assert [counter_value(group, rank) for rank in range(tp)] == [8] + [0] * (tp - 1)
            for rank, region in enumerate(regions(group)):
                for place, of_model in enumerate(heads[rank]):
                    for layer in range(4):
                        found = head(group.geometry, region, layer=layer, page=9, head=place)
                        wanted = head(local.geometry, memory, layer=layer, page=9, head=of_model)
                        pairs = zip(floats(found), floats(wanted), strict=True)
                        assert max(abs(a - b) for a, b in pairs) < 1e-4
        finally:
            await group.close()
        assert group.died.done()


def floats(data: bytes) -> memoryview:
    return memoryview(data).cast("f")


@pytest.mark.parametrize("victim", [0, 1])
async def test_one_rank_killed_ends_all_before_it_is_told(tmp_path: Path, victim: int) -> None:
    group = await WorkerGroup.start(init_for(write_tiny_llama(tmp_path), 2), timeout_s=100)
    os.kill(group.workers[victim].pid, signal.SIGSTOP)
    step = Step(0, 0, [SequenceStep(1, 0, PROMPT, PAGES, GREEDY)], [])
    running = asyncio.create_task(group.step(step))
    await asyncio.sleep(0)
    os.kill(group.workers[victim].pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match=f"rank {victim} of 2, killed by SIGKILL"):
        await asyncio.wait_for(running, ENDS_WITHIN_S)
    assert all(worker.died.done() for worker in group.workers)
    with pytest.raises(EngineDied, match=f"rank {victim} of 2"):
        await group.step(step)
    before = len(os.listdir("/proc/self/fd"))
    await group.close()
    assert len(os.listdir("/proc/self/fd")) < before


async def test_a_rank_killed_while_idle_is_told(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    group = await WorkerGroup.start(init_for(write_tiny_llama(tmp_path), 2), timeout_s=100)
    os.kill(group.workers[1].pid, signal.SIGKILL)
    reason = await asyncio.wait_for(asyncio.shield(group.died), ENDS_WITHIN_S)
    assert "rank 1 of 2, killed by SIGKILL" in str(reason)
    assert group.workers[0].died.done()
    await group.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_what_cannot_be_cut_is_told_and_leaves_no_process(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineDied, match="2 KV heads can be neither cut nor copied over 3 ranks"):
        await WorkerGroup.start(init_for(write_tiny_llama(tmp_path), 3), timeout_s=100)
    assert sorted(os.listdir("/proc/self/fd")) == before
