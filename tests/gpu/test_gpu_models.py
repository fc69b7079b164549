"""Whole models on a GPU against transformers in float32 on the CPU."""

import importlib
from pathlib import Path

import pytest
import torch

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import AttentionBackend
from pdnode.engine.flash import WORKSPACE_BYTES, FlashAttention, FlashShape
from pdnode.memory.layout import LayerViews
from pdnode.models.config import load_config
from pdnode.models.decoder import Decoder
from pdnode.models.loader import load_model
from tests.gpu.conftest import Report
from tests.support.local_engine import LocalEngine
from tests.support.model import smollm2_dir
from tests.support.reference import load_reference
from tests.support.tiny_families import reference_logits, write_family

# What FlashInfer has kernels for.
SIZES: dict[str, dict[str, object]] = {
    "llama": {"head_dim": 64, "num_attention_heads": 6},
    "qwen3 tied yarn": {"head_dim": 64, "num_attention_heads": 8},
    "deepseek_v3": {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 8,
    },
}  # fmt: skip
PROMPTS = [[3 + (7 * n) % 300 for n in range(150)], [9], [(11 * n) % 320 for n in range(70)]]
CLEAR = 1.0  # logits: a gap between the best two that bfloat16 does not close


def on_gpu(path: Path) -> LocalEngine:
    model = load_model(path, load_config(path), torch.bfloat16, device=torch.device("cuda", 0))
    return LocalEngine(
        model, pages=64, page_tokens=64, dtype="bfloat16", attend=flashinfer_over(model)
    )


def flashinfer_over(model: Decoder):  # noqa: ANN201
    module = importlib.import_module("flashinfer")
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=model.device)

    def attend(views: list[LayerViews], geometry: KvGeometry) -> AttentionBackend:
        shape = FlashShape.of(model.config, tp=1)
        return FlashAttention(module, views, geometry, shape, workspace)

    return attend


def agreement(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> tuple[float, float]:
    """(correlation of the logits, share of equal best tokens where the reference is clear)"""
    ours, theirs = torch.cat(found).float().cpu(), torch.cat(wanted)
    both = torch.stack((ours.flatten(), theirs.flatten()))
    best = theirs.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR
    equal = (ours.argmax(1) == theirs.argmax(1))[clear]
    return float(torch.corrcoef(both)[0, 1]), float(equal.float().mean())


@pytest.mark.parametrize("family", SIZES)
def test_tiny_models(family: str, tmp_path: Path, report: Report) -> None:
    path = write_family(tmp_path, family, changes=SIZES[family])
    found = on_gpu(path).logits(PROMPTS, [64, 80, 1, 5])
    correlation, equal = agreement(found, reference_logits(path, PROMPTS))
    report(f"{family}: best tokens as transformers", 100 * equal, "%")
    assert correlation > 0.99
    assert equal > 0.97


def test_smollm2(report: Report) -> None:
    grid = load_reference().grid
    prompts = [[*case.prompt, *case.tokens] for size, case in grid.items() if size in (17, 197)]
    found = on_gpu(smollm2_dir()).logits(prompts, [128, 64, 1, 1, 40])
    correlation, equal = agreement(found, reference_logits(smollm2_dir(), prompts))
    report("SmolLM2: best tokens as transformers", 100 * equal, "%")
    assert correlation > 0.999
    assert equal > 0.99
