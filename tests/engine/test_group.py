"""TP groups: real processes, one per rank, that share a tiny model and answer as one."""

import asyncio
import mmap
import os
import signal
from pathlib import Path

import pytest
import torch

from pdnode.engine.group import WorkerGroup
from pdnode.engine.protocol import (
    COUNTER_OFFSET,
    Drawn,
    Init,
    Loading,
    Scored,
    Scoring,
    SequenceStep,
    Step,
)
from pdnode.errors import EngineDied
from pdnode.memory.layout import region_views
from pdnode.memory.region import MemfdRegion
from tests.support.local_engine import GREEDY, LocalEngine, load_model
from tests.support.tiny_families import write_family
from tests.support.tiny_model import write_tiny_llama

ENDS_WITHIN_S = 20.0
PROMPT = [3 + (7 * n) % 300 for n in range(50)]
PAGES = [5, 9, 2, 11]
# A chunk that draws nothing, a chunk of which every row is read, and a decode step.
PARTS = [
    SequenceStep(1, 0, PROMPT[:32], PAGES, None),
    SequenceStep(1, 32, PROMPT[32:], [], GREEDY, Scoring(PROMPT[33:], 2)),
    SequenceStep(1, 50, [77], [], GREEDY),
]


def init_for(path: Path, tp: int) -> Init:
    return Init(str(path), "float32", 16, 16, 0, 1, 512, tp=tp, sharers=tp)


def counter_value(group: WorkerGroup, rank: int) -> int:
    with mmap.mmap(group.workers[rank].counter_fd, 4096, prot=mmap.PROT_READ) as page:
        return int.from_bytes(page[COUNTER_OFFSET : COUNTER_OFFSET + 8], "little")


def kept(engine: LocalEngine) -> torch.Tensor:
    """[L, heads, K or V, tokens, D] that the pages hold of the sequence's first 48 tokens."""
    return _kept([(views.keys, views.values) for views in engine.views])


def kept_by_rank(group: WorkerGroup, rank: int) -> torch.Tensor:
    region = MemfdRegion.adopt(os.dup(group.region_fds[rank]), group.geometry.region_bytes)
    memory = torch.frombuffer(bytearray(region.map()), dtype=torch.uint8)
    region.close()
    return _kept([(views.keys, views.values) for views in region_views(memory, group.geometry)])


def _kept(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    pages = torch.stack([torch.stack(parts) for parts in layers])[:, :, PAGES[:3]]
    return pages.permute(0, 3, 1, 2, 4, 5).flatten(3, 4)


async def check_group(path: Path, tp: int, heads: list[int]) -> None:
    """Rank r keeps head heads[r] of the model; answers and counter are those of one process."""
    local = LocalEngine(load_model(path), pages=16)
    wanted = [local.run([part]) for part in PARTS]
    memory = kept(local)
    seen: list[Loading] = []
    group = await WorkerGroup.start(init_for(path, tp), on_loading=seen.append, timeout_s=100)
    try:
        assert seen[-1].ratio == 0.95
        assert group.geometry.tp == tp
        answers = [await group.step(Step(n, group.base, [p], [])) for n, p in enumerate(PARTS)]
        for answer, whole in zip(answers, wanted, strict=True):
            check_drawn(answer.drawn, whole.drawn)
            check_scored(answer.scored, whole.scored)
        layers = local.geometry.layers
        assert [counter_value(group, rank) for rank in range(tp)] == [3 * layers] + [0] * (tp - 1)
        found = [kept_by_rank(group, rank) for rank in range(tp)]
        for rank, head in enumerate(heads):
            torch.testing.assert_close(found[rank], memory[:, head : head + 1], rtol=0, atol=1e-4)
            # Copies are equal to the last bit, so it does not matter whose is sent.
            assert torch.equal(found[rank], found[heads.index(head)])
    finally:
        await group.close()
    assert group.died.done()
    assert all(worker.died.done() for worker in group.workers)


def check_drawn(found: list[Drawn], wanted: list[Drawn]) -> None:
    assert [drawn.token for drawn in found] == [drawn.token for drawn in wanted]
    assert [drawn.logprob for drawn in found] == pytest.approx(
        [drawn.logprob for drawn in wanted], abs=1e-4
    )


def check_scored(found: list[Scored], wanted: list[Scored]) -> None:
    assert [len(scored.logprobs) for scored in found] == [len(one.logprobs) for one in wanted]
    for one, whole in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_four_ranks_with_copies_of_two_heads_answer_as_one(tmp_path: Path) -> None:
    await check_group(write_tiny_llama(tmp_path, bias=True), 4, [0, 0, 1, 1])


async def test_every_rank_keeps_the_whole_latents(tmp_path: Path) -> None:
    await check_group(write_family(tmp_path, "deepseek_v3"), 2, [0, 0])


async def test_a_rank_killed_in_a_step_ends_all_before_it_is_told(tmp_path: Path) -> None:
    group = await WorkerGroup.start(init_for(write_tiny_llama(tmp_path), 2), timeout_s=100)
    os.kill(group.workers[1].pid, signal.SIGSTOP)
    step = Step(0, 0, PARTS[:1], [])
    running = asyncio.create_task(group.step(step))
    await asyncio.sleep(0)
    os.kill(group.workers[1].pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="rank 1 of 2, killed by SIGKILL"):
        await asyncio.wait_for(running, ENDS_WITHIN_S)
    assert all(worker.died.done() for worker in group.workers)
    with pytest.raises(EngineDied, match="rank 1 of 2"):
        await group.step(step)
    await group.close()


async def test_a_rank_killed_while_idle_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    group = await WorkerGroup.start(init_for(write_tiny_llama(tmp_path), 2), timeout_s=100)
    os.kill(group.workers[0].pid, signal.SIGKILL)
    reason = await asyncio.wait_for(asyncio.shield(group.died), ENDS_WITHIN_S)
    assert "rank 0 of 2, killed by SIGKILL" in str(reason)
    assert group.workers[1].died.done()
    await group.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_what_cannot_be_cut_is_told_and_leaves_no_process(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    path = write_tiny_llama(tmp_path, heads=6, kv_heads=3)
    with pytest.raises(EngineDied, match="3 KV heads can be neither cut nor copied over 2 ranks"):
        await WorkerGroup.start(init_for(path, 2), timeout_s=100)
    assert sorted(os.listdir("/proc/self/fd")) == before
