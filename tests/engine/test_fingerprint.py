"""The fingerprint tells models apart that differ in numbers only, and nothing else."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdnode.errors import ConfigError
from pdnode.models.fingerprint import fingerprint
from tests.support.tiny_model import write_tiny_llama


def test_equal_models_are_equal_wherever_they_lie(tmp_path: Path) -> None:
    one = fingerprint(write_tiny_llama(tmp_path / "one"))
    assert one == fingerprint(write_tiny_llama(tmp_path / "two"))
    assert len(one) == 64


def test_two_fine_tunes_differ(tmp_path: Path) -> None:
    """Same config, tokenizer, header and size: every number is off by a little."""
    base = write_tiny_llama(tmp_path / "base")
    tuned = write_tiny_llama(tmp_path / "tuned")
    tensors = load_file(tuned / "model.safetensors")
    save_file(
        {name: tensor * 1.0001 for name, tensor in tensors.items()},
        tuned / "model.safetensors",
        metadata={"format": "pt"},
    )
    sizes = [(path / "model.safetensors").stat().st_size for path in (base, tuned)]
    assert sizes[0] == sizes[1]
    assert fingerprint(base) != fingerprint(tuned)


@pytest.mark.parametrize("place", ["start", "end"])
def test_the_first_and_the_last_weights_count(tmp_path: Path, place: str) -> None:
    path = write_tiny_llama(tmp_path)
    before = fingerprint(path)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header if place == "start" else -1] ^= 1
    file.write_bytes(content)
    assert fingerprint(path) != before


def test_config_and_tokenizer_count_but_not_their_writers(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    before = fingerprint(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))
    assert fingerprint(path) == before
    (path / "config.json").write_text(json.dumps(config | {"rope_theta": 10001.0}))
    changed = fingerprint(path)
    assert changed != before
    with open(path / "tokenizer.json", "a") as file:
        file.write("\n")
    assert fingerprint(path) not in (before, changed)


def test_every_shard_counts(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, shards=3)
    before = fingerprint(path)
    shard = path / "model-00003-of-00003.safetensors"
    tensors = load_file(shard)
    save_file({name: torch.zeros_like(t) for name, t in tensors.items()}, shard)
    assert fingerprint(path) != before


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    (path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors: is no safetensors file"):
        fingerprint(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        fingerprint(path)
