"""Decode passes that are recorded once per batch size: filled up, replayed, counted."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdnode.engine.attention import Segment
from pdnode.engine.flash import FlashAttention, FlashShape
from pdnode.engine.flash_tables import FixedTables
from pdnode.engine.graphs import MAX_ROWS, DecodeGraphs, graph_sizes
from pdnode.engine.protocol import SequenceStep
from pdnode.engine.runner import Runner
from pdnode.models.decoder import Decoder
from tests.support.flash_stand_in import StandIn
from tests.support.local_engine import GREEDY, LocalEngine, load_model
from tests.support.tiny_families import write_family
from tests.support.tiny_model import write_tiny_llama

PROMPTS = [[3 + (7 * n) % 300 for n in range(20)], [9, 4], [(11 * n) % 320 for n in range(33)]]


class Recorder:
    """Replays by running the body again: it can see new values in the tensors that it was recorded
    over, and nothing else, since all else was bound when it was recorded."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def replay() -> Tensor:
            self.replays += 1
            return body()

        return replay


def with_graphs(engine: LocalEngine, sizes: list[int]) -> Recorder:
    """Give `engine` a runner with recorded passes; what was raised so far counts for nothing."""
    module, recorder = StandIn(), Recorder()
    shape = FlashShape.of(engine.model.config, tp=1)
    workspace = torch.zeros(16, dtype=torch.uint8)

    def attend(rows: int) -> FlashAttention:
        fixed = FixedTables(rows, rows * 8, torch.device("cpu"))
        return FlashAttention(module, engine.views, engine.geometry, shape, workspace, fixed=fixed)

    graphs = DecodeGraphs(engine.model, sizes, attend, engine._raise, recorder)
    assert engine.raised == 0, "recording is no pass"
    engine.runner = Runner(
        engine.model, engine.attention, engine.geometry, engine._raise, graphs=graphs
    )
    return recorder


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_model(write_family(tmp_path_factory.mktemp("model"), request.param))


def test_answers_are_those_without_graphs(model: Decoder) -> None:
    """Three sequences in graphs of one, two and four rows: the last one is filled up."""
    plain, recorded = LocalEngine(model, pages=64), LocalEngine(model, pages=64)
    recorder = with_graphs(recorded, [1, 2, 4])
    assert recorded.generate(PROMPTS, 8) == plain.generate(PROMPTS, 8)
    # The first token of each comes from the pass over the prompts.
    assert recorder.replays == 7
    assert recorded.raised == plain.raised == 8 * model.config.layers
    assert recorded.runner.launched == plain.runner.launched


def test_filling_up_writes_nothing_else(tmp_path: Path) -> None:
    """Five rows in a graph of eight: no page but those of the five has changed."""
    engine = LocalEngine(load_model(write_tiny_llama(tmp_path)), pages=32)
    with_graphs(engine, [8])
    engine.memory.zero_()
    tables = {sequence: engine.take(1) for sequence in range(5)}
    engine.step([SequenceStep(n, 0, [7 + n], pages, GREEDY) for n, pages in tables.items()])
    mine = sorted(page for pages in tables.values() for page in pages)
    for layer in engine.views:
        written = layer.keys.flatten(1).any(1).nonzero().flatten().tolist()
        assert written == mine


def test_what_is_not_a_plain_decode_pass_runs_without(tmp_path: Path) -> None:
    engine = LocalEngine(load_model(write_tiny_llama(tmp_path)), pages=32)
    recorder = with_graphs(engine, [1, 2])
    pages = [engine.take(4) for _ in range(4)]
    engine.step([SequenceStep(0, 0, [5, 6, 7], pages[0], GREEDY)])  # a prompt
    engine.step([SequenceStep(1, 0, [5], pages[1], None)])  # nobody reads: a prefill node's pass
    both = [SequenceStep(n, 3 - 3 * (n > 0), [5], pages[n] if n else [], GREEDY) for n in (0, 2, 3)]
    engine.step(both)  # more rows than were recorded
    assert recorder.replays == 0
    engine.step([SequenceStep(0, 4, [5], [], GREEDY), SequenceStep(2, 1, [5], [], GREEDY)])
    assert recorder.replays == 1


def test_the_shortest_sequence_fills_up(tmp_path: Path) -> None:
    """It costs the least attention."""
    model = load_model(write_tiny_llama(tmp_path))
    planned: list[list[Segment]] = []

    class Watched:
        def plan(self, segments: list[Segment]) -> None:
            planned.append(list(segments))

        def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return queries

        def run_latent(self, *args: object) -> Tensor:
            raise NotImplementedError

    graphs = DecodeGraphs(model, [4], lambda rows: Watched(), lambda: None, Recorder())
    segments = [Segment(9, 1, [1]), Segment(2, 1, [2]), Segment(5, 1, [3])]
    assert graphs.fits(segments)
    hidden = graphs.run([10, 20, 30], segments)
    assert len(hidden) == 3
    assert planned[-1] == [*segments, segments[1]]
    assert not graphs.fits([Segment(0, 2, [1])])
    assert not graphs.fits([Segment(0, 1, [1])] * 5)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 4]),
        (16, [1, 2, 4, 8, 16]),
        (17, [1, 2, 4, 8, 16, 32]),
        (40, [1, 2, 4, 8, 16, 32, 48]),
    ],
)
def test_sizes(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes
    assert graph_sizes(10**6)[-1] == MAX_ROWS
