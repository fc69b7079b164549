"""The model's fingerprint: equal on two nodes only if they hold the same model.

Two fine-tunes differ in nothing but the numbers of their weights, so the files' contents count, by
samples: reading hundreds of gigabytes at start-up is out of the question.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from pdnode.errors import ConfigError, Problem
from pdnode.models.rawconfig import read_json
from pdnode.models.weight_files import weight_files

_BLOCKS = 64
_BLOCK_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
# Keys that name the writer, not the model.
_IGNORED = ("_name_or_path", "transformers_version")


def fingerprint(model_path: Path) -> str:
    """sha256 (hex) over config, tokenizer and, per weight file, size, header and sampled blocks.

    The header holds tensor names, types and shapes; 64 blocks of 4 KiB lie at fixed fractions of
    the file. ConfigError if a file is missing or no safetensors file.
    """
    total = hashlib.sha256()

    def add(name: str, content: bytes) -> None:
        total.update(f"{name}:{len(content)}:".encode())
        total.update(content)

    config = read_json(model_path / "config.json")
    relevant = {key: value for key, value in config.items() if key not in _IGNORED}
    add("config", json.dumps(relevant, sort_keys=True).encode())
    try:
        add("tokenizer", (model_path / "tokenizer.json").read_bytes())
        for path in weight_files(model_path):
            _add_weights(path, add)
    except OSError as error:
        where = str(error.filename or model_path)
        raise ConfigError([Problem(where, f"cannot be read: {error.strerror}")]) from error
    return total.hexdigest()


def _add_weights(path: Path, add: Callable[[str, bytes], None]) -> None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(size, _MAX_HEADER_BYTES):
            raise ConfigError([Problem(str(path), "is no safetensors file")])
        add(f"{path.name}:{size}", file.read(header_bytes))
        last = max(0, size - _BLOCK_BYTES)
        for block in range(_BLOCKS):
            file.seek(last * block // (_BLOCKS - 1))
            add(f"block {block}", file.read(_BLOCK_BYTES))
