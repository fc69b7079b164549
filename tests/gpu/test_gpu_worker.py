"""A worker process on a GPU: the layer counter, recorded passes, speed."""

from collections.abc import Sequence

import pytest

from pdnode.engine.client import Worker
from pdnode.engine.protocol import Init, Sampling, SequenceStep, Step
from pdnode.types import RegionKind
from tests.gpu.conftest import Report
from tests.support.model import smollm2_dir
from tests.support.reference import load_reference

PAGE_TOKENS, PASS_TOKENS, MOST_ROWS = 64, 2048, 64
START_S = 400.0  # FlashInfer compiles its kernels at the first start
CLEAR = 0.5  # of log probabilities
TWO_BEST = Sampling(0.0, 0, 1.0, 0, 0, [], logprobs=2)

pytestmark = pytest.mark.timeout(START_S + 200)


async def start(*, graph_rows: int, kind: RegionKind = RegionKind.CUMEM) -> Worker:
    init = Init(
        str(smollm2_dir()), "bfloat16", PAGE_TOKENS, 2048, 0, 1, PASS_TOKENS,
        dtype="bfloat16", region_kind=kind, gpus=("0",), device="cuda", graph_rows=graph_rows,
    )  # fmt: skip
    return await Worker.start(init, timeout_s=START_S)


class Sequences:
    """Steps of some sequences that are fed known tokens, each with pages of its own. Sequences of
    others before are forgotten."""

    def __init__(self, worker: Worker, count: int, pages_each: int) -> None:
        self._worker = worker
        self._pages = [list(range(n * pages_each, (n + 1) * pages_each)) for n in range(count)]
        self._done = [0] * count
        self._passes = 0
        self.compute_s = 0.0

    async def feed(self, tokens: Sequence[Sequence[int]]) -> list[list[tuple[int, float]]]:
        """The two best (token, log probability) after the last of each one's tokens. Once the pass
        is over the layer counter shows all of its layers."""
        parts = []
        for place, fed in enumerate(tokens):
            pages = [] if self._done[place] else self._pages[place]
            parts.append(SequenceStep(place, self._done[place], list(fed), pages, TWO_BEST))
            self._done[place] += len(fed)
        self._passes += 1
        forget = list(range(MOST_ROWS)) if self._passes == 1 else []
        answer = await self._worker.step(Step(self._passes, self._worker.base, parts, forget))
        self.compute_s += answer.compute_s
        assert self._worker.layers_done() == self._worker.base
        return [drawn.top for drawn in answer.drawn]


async def answers(worker: Worker, rows: int) -> list[list[tuple[int, float]]]:
    case = load_reference().grid[65]
    sequences = Sequences(worker, rows, 4)
    found = await sequences.feed([case.prompt] * rows)
    for token in case.tokens[:20]:
        found += await sequences.feed([[token]] * rows)
    return found


@pytest.mark.parametrize("kind", [RegionKind.CUMEM, RegionKind.STAGED])
async def test_recorded_passes_answer_and_count_as_others(kind: RegionKind) -> None:
    """Three rows are filled up to four."""
    plain, recorded = await start(graph_rows=0), await start(graph_rows=4, kind=kind)
    for rows in (1, 3):
        pairs = zip(await answers(plain, rows), await answers(recorded, rows), strict=True)
        for one, other in pairs:
            assert abs(one[0][1] - other[0][1]) < 0.2
            if one[0][1] - one[1][1] > CLEAR:
                assert one[0][0] == other[0][0]
    await plain.close()
    await recorded.close()


@pytest.mark.parametrize("graph_rows", [0, MOST_ROWS])
async def test_speed(graph_rows: int, report: Report) -> None:
    """No speed is asked for; the report says what it was."""
    worker = await start(graph_rows=graph_rows)
    named = "graphs" if graph_rows else "no graphs"
    prompt = [3 + (7 * n) % 300 for n in range(PASS_TOKENS)]
    for warm in (True, False):
        sequences = Sequences(worker, 1, 40)
        await sequences.feed([prompt])
        if not warm:
            report(
                f"SmolLM2 prompt of 2,048, {named}", PASS_TOKENS / sequences.compute_s, "tokens/s"
            )
    sequences.compute_s = 0.0
    for _ in range(30):
        await sequences.feed([[5]])
    report(f"SmolLM2 decode, 1 row at 2,048, {named}", 30 / sequences.compute_s, "tokens/s")
    sequences = Sequences(worker, MOST_ROWS, 4)
    await sequences.feed([prompt[:30]] * MOST_ROWS)
    sequences.compute_s = 0.0
    for _ in range(30):
        await sequences.feed([[5]] * MOST_ROWS)
    rate = MOST_ROWS * 30 / sequences.compute_s
    report(f"SmolLM2 decode, {MOST_ROWS} rows, {named}", rate, "tokens/s")
    await worker.close()
