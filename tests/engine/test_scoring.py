"""Log probabilities of a prompt do not depend on how it was cut into passes."""

from pathlib import Path

import pytest
import torch

from pdnode.engine.protocol import Scored, Scoring, SequenceStep, Step
from tests.support.local_engine import GREEDY, LocalEngine, load_model
from tests.support.tiny_model import write_tiny_llama

PROMPT = [(7 * n * n + 3 * n) % 250 + 5 for n in range(70)]


def scores(engine: LocalEngine, chunk: int) -> list[float]:
    """Of PROMPT[1:]; only the last pass draws."""
    sequence, pages = engine.new_sequence(), engine.take(len(PROMPT) + 1)
    found: list[float] = []
    for number, start in enumerate(range(0, len(PROMPT), chunk)):
        tokens = PROMPT[start : start + chunk]
        scoring = Scoring(PROMPT[start + 1 : start + 1 + chunk], 2)
        draws = GREEDY if start + chunk >= len(PROMPT) else None
        part = SequenceStep(sequence, start, tokens, [] if number else pages, draws, scoring)
        with torch.inference_mode():
            done = engine.runner.run(Step(number, engine.runner.launched, [part], []))
        (scored,) = done.scored
        assert isinstance(scored, Scored)
        assert [len(top) for top in scored.tops] == [2] * len(scored.logprobs)
        found += scored.logprobs
    return found


def test_passes_that_draw_nothing_score_as_one_that_draws(tmp_path: Path) -> None:
    engine = LocalEngine(load_model(write_tiny_llama(tmp_path)))
    whole = scores(engine, len(PROMPT))
    assert len(whole) == len(PROMPT) - 1
    assert scores(engine, 16) == pytest.approx(whole, abs=2e-3)
