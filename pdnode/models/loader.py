"""Weights from the safetensors files of a Hugging Face directory: each rank reads its part only."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdnode.errors import ConfigError, Problem
from pdnode.models.config import ModelConfig
from pdnode.models.decoder import Decoder, wanted_tensors
from pdnode.models.ranks import Alone, Ranks
from pdnode.models.tensors import Wanted
from pdnode.models.weight_files import weight_files

_STORED_DTYPES = ("F32", "BF16", "F16")
CPU = torch.device("cpu")
_SHOWN = 5  # tensor names in one message


def load_model(
    model_path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    device: torch.device = CPU,
    ranks: Ranks | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Decoder:
    """Read, check and join this rank's weights as `dtype` on `device`. `progress` gets the share
    read, 0..1.

    ConfigError names tensors that are missing, unexpected, or not shaped as config.json says, and
    sizes that `ranks` cannot share.
    """
    ranks = ranks or Alone()
    if problems := config.tp_problems(ranks.tp):
        raise ConfigError(problems)
    wanted = wanted_tensors(config, ranks)

    def part(stored: Any, one: Wanted) -> Tensor:  # noqa: ANN401
        return _part(stored, one, dtype).to(device)

    tensors = _read_all(model_path, config, wanted, part, progress)
    # What is joined with others is dropped as it is joined.
    return Decoder(config, tensors.pop, ranks)


def _read_all(
    model_path: Path,
    config: ModelConfig,
    wanted: dict[str, Wanted],
    part: Callable[[Any, Wanted], Tensor],
    progress: Callable[[float], None],
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    unexpected: list[str] = []
    problems: list[Problem] = []
    for name, stored in _stored(weight_files(model_path)):
        if name not in wanted:
            if not _is_known_extra(name, config):
                unexpected.append(name)
            continue
        if text := _unfit(stored, wanted[name]):
            problems.append(Problem(f"tensor {name}", text))
        tensors[name] = torch.empty(0) if text else part(stored, wanted[name])
        progress(len(tensors) / len(wanted))
    for what, names in (
        ("missing", sorted(wanted.keys() - tensors.keys())),
        ("unexpected", sorted(unexpected)),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text = f"{what} tensors: {', '.join(names[:_SHOWN])}{more}"
            problems.append(Problem(str(model_path), text))
    if problems:
        raise ConfigError(problems)
    return tensors


def _is_known_extra(name: str, config: ModelConfig) -> bool:
    """What some checkpoints hold beside the model: the tied head again, the fixed rotary
    frequencies, layers for speculation after the last one."""
    if name == "lm_head.weight":
        return config.tied_embeddings
    extra = range(config.layers, config.layers + config.extra_layers)
    return name.endswith("rotary_emb.inv_freq") or any(
        name.startswith(f"model.layers.{layer}.") for layer in extra
    )


# safetensors has no types: a handle on a stored tensor has get_shape and reads what [...] asks for.
def _stored(files: list[Path]) -> Iterator[tuple[str, Any]]:
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_slice(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error


def _unfit(stored: Any, wanted: Wanted) -> str:  # noqa: ANN401
    """Why a stored tensor is not what is wanted; empty if it is."""
    if (kind := stored.get_dtype()) not in _STORED_DTYPES:
        return f"is stored as {kind}; allowed: {', '.join(_STORED_DTYPES)}"
    if (shape := stored.get_shape()) != list(wanted.shape):
        return f"has shape {shape}, config.json asks for {list(wanted.shape)}"
    return ""


def _part(stored: Any, wanted: Wanted, dtype: torch.dtype) -> Tensor:  # noqa: ANN401
    index: list[slice] = [slice(None)] * len(wanted.shape)
    if wanted.part is not None:
        index[wanted.dim] = slice(wanted.part.start, wanted.part.stop)
    found: Tensor = stored[tuple(index)]
    # A view of the mapped file: only what is looked at is read. Columns are copied together.
    return found.to(torch.float32 if wanted.exact else dtype).contiguous()
