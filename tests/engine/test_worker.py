"""The worker process and the daemon's side of it: real processes, a tiny model."""

import asyncio
import mmap
import os
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch

from pdnode.core.geometry import KvGeometry
from pdnode.engine.backend import AUTO_POOL_RATIO, CpuBackend
from pdnode.engine.client import Worker, default_threads
from pdnode.engine.protocol import (
    COUNTER_OFFSET,
    SLEEPING_OFFSET,
    Init,
    Loading,
    Sampling,
    SequenceStep,
    Step,
)
from pdnode.engine.worker import choose_pages
from pdnode.errors import ConfigError, EngineDied
from pdnode.memory.region import MemfdRegion, available_bytes
from tests.support.local_engine import GREEDY, LocalEngine, load_model
from tests.support.model import smollm2_dir
from tests.support.reference import load_reference
from tests.support.tiny_model import CONTEXT_TOKENS, VOCABULARY, write_tiny_llama

ENDS_WITHIN_S = 10.0
PROMPT = [3 + (7 * n) % 300 for n in range(50)]


def init_for(path: Path, *, pages: int = 64, pool_bytes: int = 0, dtype: str = "float32") -> Init:
    return Init(str(path), dtype, 16, pages, pool_bytes, 1, 512)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def worker(tiny: Path) -> AsyncIterator[Worker]:
    """A worker to be spoiled."""
    started = await Worker.start(init_for(tiny), timeout_s=60)
    yield started
    await started.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny: Path) -> AsyncIterator[Worker]:
    """A worker that stays whole: most of a start is importing torch."""
    started = await Worker.start(init_for(tiny), timeout_s=60)
    yield started
    await started.close()


lasting = pytest.mark.asyncio(loop_scope="module")


def geometry(worker: Worker) -> KvGeometry:
    ready = worker.ready
    return KvGeometry(
        ready.kind,
        ready.layers,
        ready.kv_heads,
        ready.head_dim,
        ready.page_tokens,
        ready.dtype,
        1,
        ready.pages,
    )


def counter_value(worker: Worker) -> int:
    with mmap.mmap(worker.counter_fd, 4096, prot=mmap.PROT_READ) as page:
        return int.from_bytes(page[COUNTER_OFFSET : COUNTER_OFFSET + 8], "little")


async def gone(pidfd: int) -> None:
    """Wait until the process behind `pidfd` has ended, and close it."""
    ended = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
    try:
        await asyncio.wait_for(ended, ENDS_WITHIN_S)
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


async def generate(worker: Worker, count: int, *, chunk: int = 64, sequence: int = 1) -> list[int]:
    pages = list(range(5, 5 + geometry(worker).pages_for(len(PROMPT) + count)))
    tokens, done = list(PROMPT), 0
    while len(tokens) < len(PROMPT) + count:
        end = min(len(tokens), done + chunk)
        sampling = GREEDY if end == len(tokens) else None
        part = SequenceStep(sequence, done, tokens[done:end], pages if done == 0 else [], sampling)
        answer = await worker.step(Step(worker.base, worker.base, [part], []))
        tokens += [drawn.token for drawn in answer.drawn]
        done = end
    return tokens[len(PROMPT) :]


async def test_ready_tells_the_geometry_and_hands_over_the_memory(tiny: Path) -> None:
    seen: list[Loading] = []
    worker = await Worker.start(init_for(tiny), on_loading=seen.append, timeout_s=60)
    ready = worker.ready
    assert (ready.kind, ready.layers, ready.kv_heads, ready.head_dim) == ("gqa", 4, 2, 16)
    assert (ready.page_tokens, ready.dtype, ready.pages) == (16, "float32", 64)
    assert (ready.vocabulary, ready.context_tokens) == (VOCABULARY, CONTEXT_TOKENS)
    assert [frame.ratio for frame in seen] == sorted(frame.ratio for frame in seen)
    assert {frame.what for frame in seen} == {"weights", "warm-up", "memory"}
    region = MemfdRegion.adopt(os.dup(worker.region_fd), geometry(worker).region_bytes)
    assert not any(region.map()[:4096])
    assert counter_value(worker) == 0
    region.close()
    await worker.close()
    await worker.close()
    assert worker.died.done()


@lasting
async def test_tokens_pages_and_counter_are_those_of_a_local_run(
    shared: Worker, tiny: Path
) -> None:
    worker, base = shared, shared.base
    local = LocalEngine(load_model(tiny), pages=64)
    local.free = list(range(63, 4, -1))
    (wanted,) = local.generate([PROMPT], 6, 16)
    assert await generate(worker, 6, chunk=16) == wanted
    # Four chunks of the prompt, of which the last draws, and five decode steps; four layers each.
    assert local.raised == worker.base - base == 4 * (4 + 5)
    assert counter_value(worker) == worker.base
    region = MemfdRegion.adopt(os.dup(worker.region_fd), geometry(worker).region_bytes)
    assert bytes(region.map()) == local.memory.numpy().tobytes()
    region.close()


async def test_raising_a_layer_wakes_a_sleeping_group(tiny: Path) -> None:
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    worker = await Worker.start(init_for(tiny), wake_fds=[wake], timeout_s=60)
    await generate(worker, 1)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(wake)
    with mmap.mmap(worker.counter_fd, 4096) as page:
        page[SLEEPING_OFFSET : SLEEPING_OFFSET + 4] = struct.pack("<I", 1)
    await generate(worker, 1, sequence=2)
    assert os.eventfd_read(wake) >= 1
    await worker.close()
    os.close(wake)


@lasting
async def test_seeded_draws_do_not_depend_on_the_batch(shared: Worker) -> None:
    worker = shared

    def part(sequence: int, page: int, seed: int) -> SequenceStep:
        sampling = Sampling(1.0, 0, 1.0, seed, 0, [])
        return SequenceStep(sequence, 0, PROMPT[:10], [page], sampling)

    alone = await worker.step(Step(0, worker.base, [part(40, 0, 77)], []))
    parts = [part(40 + n, n, 70 + n) for n in range(2, 12)]
    beside = await worker.step(Step(1, worker.base, parts, [40]))
    assert [drawn.sequence for drawn in beside.drawn] == list(range(42, 52))
    assert beside.drawn[5].token == alone.drawn[0].token
    assert len({drawn.token for drawn in beside.drawn}) > 1


@lasting
async def test_forgotten_sequences_may_come_back_with_other_pages(shared: Worker) -> None:
    worker = shared
    first = await generate(worker, 2, sequence=21)
    part = SequenceStep(21, 0, PROMPT, [60, 2, 61, 4], GREEDY)
    again = await worker.step(Step(9, worker.base, [part], [21]))
    assert again.drawn[0].token == first[0]


async def test_killed_worker_is_noticed_at_once_in_the_middle_of_a_step(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    part = SequenceStep(1, 0, PROMPT, [1, 2, 3, 4], GREEDY)
    step = asyncio.create_task(worker.step(Step(0, 0, [part], [])))
    await asyncio.sleep(0)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="killed by SIGKILL"):
        await asyncio.wait_for(step, ENDS_WITHIN_S)
    assert "killed by SIGKILL" in str(worker.died.result())
    with pytest.raises(EngineDied, match="SIGKILL"):
        await worker.step(Step(1, worker.base, [part], []))


async def test_killed_while_idle_resolves_died(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    reason = await asyncio.wait_for(asyncio.shield(worker.died), ENDS_WITHIN_S)
    assert "killed by SIGKILL" in str(reason)


@lasting
async def test_signals_to_the_group_leave_the_worker_to_the_daemon(shared: Worker) -> None:
    worker = shared
    os.kill(worker.pid, signal.SIGTERM)
    os.kill(worker.pid, signal.SIGINT)
    assert len(await generate(worker, 2, sequence=31)) == 2


async def test_close_frees_every_descriptor(tiny: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    worker = await Worker.start(init_for(tiny), timeout_s=60)
    pidfd = os.pidfd_open(worker.pid)
    await worker.close()
    await gone(pidfd)
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_nonsense_ends_the_worker_in_words(worker: Worker) -> None:
    part = SequenceStep(1, 0, PROMPT, [1, 2], GREEDY)
    with pytest.raises(EngineDied, match="exited with 1: AssertionError: 50 tokens, 2 pages"):
        await worker.step(Step(0, 0, [part], []))


async def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match=r"config\.json: cannot be read: No such file"):
        await Worker.start(init_for(tmp_path / "missing"), timeout_s=60)


def test_a_pool_too_small_for_a_page_is_told(tiny: Path) -> None:
    one_page = KvGeometry("gqa", 4, 2, 16, 16, "float32", 1, 1)
    with pytest.raises(ConfigError, match="1000 bytes hold no page; one takes 16384"):
        choose_pages(init_for(tiny, pages=0, pool_bytes=1000), one_page, lambda: 1 << 40)


def test_an_automatic_pool_is_a_share_of_what_is_free(tiny: Path) -> None:
    one_page = KvGeometry("gqa", 4, 2, 16, 16, "float32", 1, 1)
    init = init_for(tiny, pages=0)
    backend = CpuBackend(init, torch.float32)
    found = choose_pages(init, one_page, backend.auto_pool_bytes) * 16384
    assert found == pytest.approx(available_bytes() * AUTO_POOL_RATIO, rel=0.2)


async def test_pool_bytes_decide_the_pages_and_weights_may_have_a_dtype_of_their_own(
    tiny: Path,
) -> None:
    init = init_for(tiny, pages=0, pool_bytes=100_000, dtype="bfloat16")
    worker = await Worker.start(msgspec.structs.replace(init, dtype="float32"), timeout_s=60)
    assert worker.ready.pages == 100_000 // (4 * 16 * 2 * 2 * 16 * 2)
    assert worker.ready.dtype == "bfloat16"
    await worker.close()


async def test_an_interpreter_that_is_not_there_is_told(tiny: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineDied, match=r"/nowhere/python cannot be started: .*No such file"):
        await Worker.start(init_for(tiny), python="/nowhere/python")
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_a_worker_that_does_not_get_ready_is_ended(tiny: Path) -> None:
    with pytest.raises(EngineDied, match=r"not ready after 0\.01 s"):
        await Worker.start(init_for(tiny), timeout_s=0.01)


async def test_killed_daemon_leaves_no_worker(tiny: Path) -> None:
    """A process of its own starts a worker, tells its pid and is killed."""
    script = f"""
        import asyncio, sys
        from pdnode.engine.client import Worker
        from pdnode.engine.protocol import Init

        async def main():
            worker = await Worker.start(Init({str(tiny)!r}, "float32", 16, 8, 0, 1, 64))
            print(worker.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(script), stdout=subprocess.PIPE
    )
    assert daemon.stdout is not None
    line = await asyncio.wait_for(daemon.stdout.readline(), 60)
    pidfd = os.pidfd_open(int(line))
    daemon.kill()
    await daemon.wait()
    await gone(pidfd)


async def test_the_daemons_side_imports_no_torch() -> None:
    code = (
        "import sys, pdnode.engine.client as c; assert 'torch' not in sys.modules; print(c.Worker)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert b"Worker" in out


def test_default_threads_leave_one_for_the_rest() -> None:
    assert default_threads() == max(1, len(os.sched_getaffinity(0)) - 1)


async def test_the_real_model_in_a_worker() -> None:
    case = load_reference().grid[65]
    worker = await Worker.start(init_for(smollm2_dir(), pages=16), timeout_s=100)
    tokens, pages = list(case.prompt), [9, 3, 14, 0, 7, 1]
    done = 0
    while len(tokens) < len(case.prompt) + 6:
        part = SequenceStep(1, done, tokens[done:], pages if done == 0 else [], GREEDY)
        done = len(tokens)
        answer = await worker.step(Step(done, worker.base, [part], []))
        tokens.append(answer.drawn[0].token)
    assert tokens[len(case.prompt) :] == case.tokens[:6]
    assert counter_value(worker) == 6 * 30
    await worker.close()


async def test_it_keeps_to_the_cpus_it_is_given(tiny: Path) -> None:
    """All its threads, those of the first parallel section included."""
    cpu = min(os.sched_getaffinity(0))
    init = msgspec.structs.replace(init_for(tiny), threads=0, cpus=(cpu,))
    worker = await Worker.start(init, timeout_s=60)
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{worker.pid}/task")]
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset({cpu})}
    finally:
        await worker.close()
