"""Rotary scaling and logits of small models against numbers that transformers 5.24.0 gave."""

import json
from pathlib import Path

import pytest
import torch

from pdnode.engine.protocol import SequenceStep
from pdnode.models.mlp import Mlp
from pdnode.models.rope import inverse_frequencies
from pdnode.models.ropeconfig import RopeScaling
from tests.support.local_engine import GREEDY, LocalEngine, load_model
from tests.support.tiny_model import write_tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama3_scaling_keeps_fast_stretches_slow_and_blends_between() -> None:
    found = inverse_frequencies(16, 10000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 512))
    wanted = [1.0, 0.3162277638, 0.1, 0.0184966772, 0.00125, 0.000395284732, 0.000125, 3.952847e-05]
    assert found.tolist() == pytest.approx(wanted, rel=1e-6)


def test_linear_scaling_stretches_all() -> None:
    found = inverse_frequencies(4, 10000.0, RopeScaling("linear", 4.0))
    assert found.tolist() == pytest.approx([0.25, 0.0025])


@pytest.mark.parametrize(
    ("options", "rope_scaling", "wanted"),
    [
        ({}, None, [1.4498603, 3.3201418, 1.4068141, -1.6940941, -1.3108360, 0.5705203]),
        (
            {"bias": True, "seed": 3},
            LLAMA3,
            [-0.1229993, -2.6796162, 2.0819795, -0.6211050, 1.1336344, 1.7604213],
        ),
        (
            {"tied": True, "kv_heads": 4},
            None,
            [6.8039856, -12.2984657, 10.6579762, -13.8808079, -0.3620554, 4.6902657],
        ),
        (
            {"shards": 2, "kv_heads": 1},
            None,
            [1.3308128, -1.6997359, -0.6696773, 1.6849983, -0.2687812, 0.3441592],
        ),
    ],
)
def test_logits_of_every_variant(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, int],
    rope_scaling: dict[str, object] | None,
    wanted: list[float],
) -> None:
    """The last of 57 tokens (3, 4, …), fed in two chunks."""
    path = write_tiny_llama(tmp_path, **options)
    if rope_scaling is not None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"rope_scaling": rope_scaling}))
    engine = LocalEngine(load_model(path))
    seen: list[torch.Tensor] = []
    logits = engine.model.logits

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    monkeypatch.setattr(engine.model, "logits", keep)
    engine.step([SequenceStep(1, 0, list(range(3, 35)), engine.take(57), None)])
    (drawn,) = engine.step([SequenceStep(1, 32, list(range(35, 60)), [], GREEDY)])
    (row,) = seen[0]
    assert row[:6].tolist() == pytest.approx(wanted, abs=2e-5)
    assert drawn.token == int(row.argmax())
    assert drawn.logprob == pytest.approx(float(row.log_softmax(0).max()), abs=1e-6)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.5), ("float16", 0.03)])
def test_short_dtypes_stay_near_float32(tmp_path: Path, dtype: str, error: float) -> None:
    """Log probability of the token that float32 finds best, at the start and after seven."""
    path = write_tiny_llama(tmp_path)
    prompts = [list(range(3, 60)), [9], list(range(80, 97))]
    exact = LocalEngine(load_model(path))
    tokens = exact.generate(prompts, 8)
    short = LocalEngine(load_model(path, dtype), dtype=dtype)
    for prompt, answer in zip(prompts, tokens, strict=True):
        for place in (0, 7):
            known = prompt + answer[:place]
            found = []
            for engine in (exact, short):
                part = SequenceStep(
                    engine.new_sequence(), 0, known, engine.take(len(known)), GREEDY
                )
                found.append(engine.step([part])[0].logprob)
            assert found[1] == pytest.approx(found[0], abs=error)


def test_a_pass_that_draws_nothing_ends_with_the_last_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill node's pass: what follows the last raise is of no use to anyone."""
    engine = LocalEngine(load_model(write_tiny_llama(tmp_path)))
    calls: list[str] = []
    run = Mlp.run
    monkeypatch.setattr(Mlp, "run", lambda *of: calls.append("mlp") or run(*of))
    layers = engine.model.config.layers
    engine.step([SequenceStep(1, 0, list(range(3, 35)), engine.take(57), None)])
    assert len(calls) == layers - 1
    calls.clear()
    engine.step([SequenceStep(1, 32, list(range(35, 60)), [], GREEDY)])
    assert len(calls) == layers
