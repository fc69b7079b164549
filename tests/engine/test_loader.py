"""Weights: what lies on disk arrives in its place, and what is wrong with it is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdnode.errors import ConfigError
from pdnode.models.config import load_config
from pdnode.models.loader import load_model as load_decoder
from tests.support.local_engine import LocalEngine
from tests.support.local_engine import load_model as load
from tests.support.tiny_model import write_tiny_llama

PROMPTS = [list(range(10, 40)), [5], list(range(100, 117))]


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) drop tensors of a single-file checkpoint."""
    tensors = {**load_file(path / "model.safetensors"), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")


def test_progress_rises_to_one(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, bias=True)
    seen: list[float] = []
    load_decoder(path, load_config(path), torch.bfloat16, progress=seen.append)
    assert seen[-1] == 1.0
    assert seen == sorted(seen)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, tied=True)
    plain = LocalEngine(load(path)).generate(PROMPTS, 8)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(path, {"lm_head.weight": embedding * 2})
    assert LocalEngine(load(path)).generate(PROMPTS, 8) == plain


def test_shards_give_the_same_tokens_as_one_file(tmp_path: Path) -> None:
    one = LocalEngine(load(write_tiny_llama(tmp_path / "one")))
    many = LocalEngine(load(write_tiny_llama(tmp_path / "many", shards=3)))
    assert one.generate(PROMPTS, 8) == many.generate(PROMPTS, 8, 5)


def test_biases_change_the_answer(tmp_path: Path) -> None:
    plain = LocalEngine(load(write_tiny_llama(tmp_path / "plain")))
    biased = LocalEngine(load(write_tiny_llama(tmp_path / "biased", bias=True)))
    assert plain.generate(PROMPTS, 8) != biased.generate(PROMPTS, 8)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    rewrite(path, {"model.norm.weight": None, "model.layers.7.surprise": torch.ones(1)})
    with pytest.raises(ConfigError) as caught:
        load(path)
    texts = [problem.text for problem in caught.value.problems]
    assert texts == [
        "missing tensors: model.norm.weight",
        "unexpected tensors: model.layers.7.surprise",
    ]


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    rewrite(path, {f"extra.{number}": torch.ones(1) for number in range(8)})
    with pytest.raises(ConfigError, match=r"extra\.0, .*extra\.4 and 3 more"):
        load(path)


def test_wrong_shapes_are_named_with_both(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    rewrite(path, {"model.norm.weight": torch.ones(63)})
    with pytest.raises(ConfigError, match=r"norm\.weight: has shape \[63\], .* asks for \[64\]"):
        load(path)


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, shards=2)
    shard = path / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"00002-of-00002\.safetensors: cannot be read"):
        load(path)
    shard.unlink()
    with pytest.raises(ConfigError, match=r"00002-of-00002\.safetensors', which is no file"):
        load(path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret"}}')
    with pytest.raises(ConfigError, match=r"'\.\./\.\./secret', which is no file"):
        load(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load(path)


def test_short_floats_are_refused_by_name(tmp_path: Path) -> None:
    """FP8 weights whose config.json does not say so."""
    path = write_tiny_llama(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path / "model.safetensors")
    rewrite(path, {name: tensors[name].to(torch.float8_e4m3fn)})
    with pytest.raises(ConfigError, match=r"up_proj\.weight: is stored as F8_E4M3; allowed: F32"):
        load(path)


def test_layers_for_speculation_are_left_out(tmp_path: Path) -> None:
    """The checkpoint's layers after the last one, as many as config.json says."""
    path = write_tiny_llama(tmp_path)
    plain = LocalEngine(load(path)).generate(PROMPTS, 8)
    rewrite(path, {"model.layers.4.eh_proj.weight": torch.ones(2, 2)})
    with pytest.raises(ConfigError, match=r"unexpected tensors: model\.layers\.4\.eh_proj"):
        load(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert LocalEngine(load(path)).generate(PROMPTS, 8) == plain
