"""A model's passes make every tensor on the device of its weights.

The device here is torch's "meta", which computes shapes only: an operation that gets one tensor of
it and another of the CPU is an error.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdnode.engine.attention import Segment
from pdnode.engine.cuda import keep_kernels
from pdnode.engine.protocol import SequenceStep, Step
from pdnode.engine.runner import Runner
from pdnode.engine.sampler import Draw
from pdnode.models.config import load_config
from pdnode.models.loader import load_model
from pdnode.models.passes import LatentUp
from tests.support.local_engine import GREEDY
from tests.support.tiny_families import write_family

META = torch.device("meta")


class Shapes:
    """An attention back end that gives tensors of the right shape."""

    def plan(self, segments: list[Segment]) -> None:
        pass

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert queries.device == keys.device == values.device == META
        return torch.empty_like(queries)

    def run_latent(self, layer: int, queries: Tensor, latents: Tensor, up: LatentUp) -> Tensor:
        assert queries.device == latents.device == up.keys.device == META
        return queries.new_empty(*queries.shape[:2], up.values.shape[1])


@pytest.mark.parametrize("family", ["llama", "qwen3 tied yarn", "deepseek_v3"])
def test_a_pass_stays_on_its_device(family: str, tmp_path: Path) -> None:
    """Experts alone cannot be passed through: which are chosen is read back to the CPU."""
    changes = {"first_k_dense_replace": 3} if family == "deepseek_v3" else None
    path = write_family(tmp_path, family, changes=changes)
    config = load_config(path)
    model = load_model(path, config, torch.float32, device=META)
    assert model.device == META
    geometry = config.kv_geometry(page_tokens=16, pages=8)
    drawn: list[torch.Size] = []

    def sampler(logits: Tensor, samplings: list[object]) -> list[Draw]:
        assert logits.device == META
        drawn.append(logits.shape)
        return [Draw(0, 0.0, []) for _ in samplings]

    runner = Runner(model, Shapes(), geometry, lambda: None, sampler=sampler)
    steps = [
        SequenceStep(0, 0, [5, 6, 7], [1], GREEDY),
        SequenceStep(1, 0, [9], [2], GREEDY),
        SequenceStep(2, 0, [3, 4], [3], None),
    ]
    runner.run(Step(0, 0, steps, []))
    assert drawn == [(2, config.vocabulary)]


def test_compiled_kernels_are_kept_where_the_node_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_CACHE_PATH", "/elsewhere")
    for name in ("FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    keep_kernels(str(tmp_path / "kernels"))
    assert os.environ["CUDA_CACHE_PATH"] == "/elsewhere"
    place = Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
    assert (place.parent, place.is_dir()) == (tmp_path / "kernels", True)
