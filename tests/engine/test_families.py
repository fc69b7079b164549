"""Every family and sharding against the logits of transformers, float32, on random checkpoints.

Prompts run unchunked, in chunks of 16 beside each other, and in odd pieces that end in single
tokens (the decode path). MOST_DIFFERENCE is of the logits' standard deviation; equal models differ
by the order of sums alone, found up to 1e-5.
"""

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdnode.errors import ConfigError
from pdnode.models.config import ModelConfig, load_config, parse_config
from pdnode.models.decoder import wanted_tensors
from pdnode.models.loader import load_model as load_decoder
from pdnode.models.ranks import Alone
from pdnode.models.rawconfig import read_json
from tests.support.local_engine import LocalEngine, load_model
from tests.support.thread_ranks import ThreadRanks, on_ranks
from tests.support.tiny_families import (
    FAMILIES,
    reference_logits,
    with_old_rope_spelling,
    write_family,
)

MOST_DIFFERENCE = 3e-5
PROMPTS = [[3 + (7 * n) % 300 for n in range(75)], [9], [(11 * n) % 320 for n in range(33)]]
SIZES = {"whole": [75], "chunks": [16], "pieces": [7, 30, 1, 20, 1]}
RANKS = {
    "llama": (1, 2, 4),
    "llama tied llama3": (1, 3),
    "llama one KV head": (2, 3, 4),
    "qwen3 tied yarn": (1, 2, 4),
    "qwen3_moe": (1, 2, 4),
    "qwen3_moe sparse": (1, 2, 3),
    "deepseek_v3": (1, 2, 3, 4),
    "deepseek_v3 plain": (1, 2),
}

# Norms, routers, last biases; and what makes latents, which every rank keeps whole.
UNCUT = {
    *("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"),
    *("gate", "o_proj", "down_proj"),
    *("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def write(family: str) -> Path:
        return write_family(tmp_path_factory.mktemp("family"), family)

    return write


@functools.cache
def wanted(path: Path) -> list[torch.Tensor]:
    return reference_logits(path, PROMPTS)


@pytest.mark.parametrize(("family", "tp"), [(name, tp) for name in FAMILIES for tp in RANKS[name]])
def test_logits_are_those_of_transformers(
    checkpoint: Callable[[str], Path], family: str, tp: int
) -> None:
    path = checkpoint(family)

    def work(ranks: ThreadRanks) -> list[list[torch.Tensor]]:
        engine = LocalEngine(load_model(path, ranks=ranks), pages=64)
        return [engine.logits(PROMPTS, sizes) for sizes in SIZES.values()]

    for of_rank in on_ranks(tp, work):
        for name, of_sizes in zip(SIZES, of_rank, strict=True):
            for found, reference in zip(of_sizes, wanted(path), strict=True):
                difference = float((found - reference).abs().max() / reference.std())
                assert difference < MOST_DIFFERENCE, (name, len(found))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_short_dtypes_stay_near(checkpoint: Callable[[str], Path], family: str, dtype: str) -> None:
    """Rounding may change a token's experts, so that only the whole is compared."""
    path = checkpoint(family)
    engine = LocalEngine(load_model(path, dtype), pages=64, dtype=dtype)
    found = torch.cat(engine.logits(PROMPTS, SIZES["pieces"])).flatten()
    both = torch.stack((found, torch.cat(wanted(path)).flatten()))
    assert float(torch.corrcoef(both)[0, 1]) > 0.99


def replaced(config: ModelConfig, inner: str, change: dict[str, object]) -> ModelConfig:
    return replace(config, **{inner: replace(getattr(config, inner), **change)})


@pytest.mark.parametrize(
    ("family", "inner", "change"),
    [
        ("llama tied llama3", "rope_scaling", {"original_context": 128}),
        ("qwen3 tied yarn", "rope_scaling", {"amplitude": 1.0}),
        ("qwen3 tied yarn", "rope_scaling", {"original_context": 1024}),
        ("qwen3_moe", "experts", {"normalized": False}),
        ("qwen3_moe sparse", "experts", {"normalized": True}),
        ("deepseek_v3", "experts", {"groups_per_token": 4}),
        ("deepseek_v3", "experts", {"groups": 2}),
        ("deepseek_v3", "experts", {"scale": 1.0}),
        ("deepseek_v3", "experts", {"normalized": False}),
        ("deepseek_v3", "latent", {"interleaved": False}),
        ("deepseek_v3", "rope_scaling", {"softmax_factor": 1.0}),
        ("deepseek_v3", "rope_scaling", {"amplitude": 1.0}),
        ("deepseek_v3 plain", "latent", {"interleaved": True}),
    ],
)
def test_a_mistake_is_seen(
    checkpoint: Callable[[str], Path], family: str, inner: str, change: dict[str, object]
) -> None:
    """What these checkpoints would not show, the comparison above would not test."""
    path = checkpoint(family)
    wrong = replaced(load_config(path), inner, change)
    engine = LocalEngine(load_decoder(path, wrong, torch.float32), pages=64)
    (found, *_), (reference, *_) = engine.logits(PROMPTS, [75]), wanted(path)
    assert float((found - reference).abs().max() / reference.std()) > 100 * MOST_DIFFERENCE


def test_the_routers_correction_is_seen(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("deepseek_v3"), tmp_path / "model")
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor.zero_()
        save_file(tensors, file)
    engine = LocalEngine(load_model(path), pages=64)
    (found, *_), (reference, *_) = engine.logits(PROMPTS, [75]), wanted(checkpoint("deepseek_v3"))
    assert float((found - reference).abs().max() / reference.std()) > 100 * MOST_DIFFERENCE


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_read_each_number_of_a_cut_tensor_once(
    checkpoint: Callable[[str], Path], family: str
) -> None:
    """Keys and values are read by all ranks that hold copies of a head."""
    config = load_config(checkpoint(family))
    tp = RANKS[family][-1]
    copies = tp // min(tp, config.kv_heads)
    wholes = wanted_tensors(config, Alone())
    parts = on_ranks(tp, lambda ranks: wanted_tensors(config, ranks))
    cut = {name for name, part in parts[0].items() if part.part is not None}
    assert {name.split(".")[-2] for name in wholes.keys() - cut} <= UNCUT
    for name in cut:
        assert len({(part[name].shape, part[name].dim) for part in parts}) == 1
        read = sorted(number for part in parts for number in part[name].part or ())
        several = copies if name.split(".")[-2] in ("k_proj", "v_proj") else 1
        whole = range(wholes[name].shape[parts[0][name].dim])
        assert read == sorted([*whole] * several), name


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_of_rotary_positions_mean_the_same(
    checkpoint: Callable[[str], Path], family: str
) -> None:
    path = checkpoint(family)
    assert parse_config(with_old_rope_spelling(path)) == parse_config(
        read_json(path / "config.json")
    )


@pytest.mark.parametrize(
    ("family", "tp", "text"),
    [
        ("llama", 3, "2 KV heads can be neither cut nor copied over 3 ranks"),
        ("qwen3_moe", 5, "moe_intermediate_size 48 is no multiple of 5"),
        ("deepseek_v3", 8, "attention heads 12 is no multiple of 8"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_both_numbers(
    checkpoint: Callable[[str], Path], family: str, tp: int, text: str
) -> None:
    ranks = ThreadRanks.__new__(ThreadRanks)
    ranks.rank, ranks.tp = 0, tp
    with pytest.raises(ConfigError, match=text):
        load_model(checkpoint(family), ranks=ranks)
