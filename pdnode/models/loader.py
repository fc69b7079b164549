"""Weights from the safetensors files of a Hugging Face directory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdnode.errors import ConfigError, Problem
from pdnode.models.config import ModelConfig
from pdnode.models.llama import LayerWeights, LlamaWeights
from pdnode.models.weight_files import weight_files

_SHOWN = 5  # tensor names in one message


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of `config` has."""
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden, config.intermediate
    linear = {
        "self_attn.q_proj": (query, hidden, config.attention_bias),
        "self_attn.k_proj": (kv, hidden, config.attention_bias),
        "self_attn.v_proj": (kv, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query, config.attention_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def load_weights(
    model_path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Callable[[float], None] = lambda _: None,
) -> LlamaWeights:
    """Read, check and join the weights as `dtype`. `progress` gets the share read, 0..1.

    ConfigError names tensors that are missing, unexpected, or not shaped as config.json says.
    """
    expected = expected_shapes(config)
    tensors: dict[str, Tensor] = {}
    unexpected: list[str] = []
    problems: list[Problem] = []
    for name, tensor in _read(weight_files(model_path)):
        if name not in expected:
            # Some checkpoints store the tied head again, or the fixed rotary frequencies.
            tied = name == "lm_head.weight" and config.tied_embeddings
            if not tied and not name.endswith("rotary_emb.inv_freq"):
                unexpected.append(name)
            continue
        if tensor.shape != expected[name]:
            text = f"has shape {list(tensor.shape)}, config.json asks for {list(expected[name])}"
            problems.append(Problem(f"tensor {name}", text))
        tensors[name] = tensor.to(dtype)
        progress(len(tensors) / len(expected))
    for what, names in (
        ("missing", sorted(expected.keys() - tensors.keys())),
        ("unexpected", sorted(unexpected)),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            text = f"{what} tensors: {', '.join(names[:_SHOWN])}{more}"
            problems.append(Problem(str(model_path), text))
    if problems:
        raise ConfigError(problems)
    return _assemble(tensors, config)


def _read(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error


def _assemble(tensors: dict[str, Tensor], config: ModelConfig) -> LlamaWeights:
    """Join what is multiplied together; parts are dropped as they are joined."""

    def joined(prefix: str, kind: str, *names: str) -> Tensor | None:
        parts = [tensors.pop(f"{prefix}{name}.{kind}", None) for name in names]
        present = [part for part in parts if part is not None]
        return torch.cat(present) if len(present) > 1 else present[0] if present else None

    def weight(prefix: str, *names: str) -> Tensor:
        tensor = joined(prefix, "weight", *names)
        assert tensor is not None
        return tensor

    layers = []
    for number in range(config.layers):
        prefix = f"model.layers.{number}."
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        layers.append(
            LayerWeights(
                input_norm=weight(prefix, "input_layernorm"),
                qkv=weight(prefix, *qkv),
                qkv_bias=joined(prefix, "bias", *qkv),
                output=weight(prefix, "self_attn.o_proj"),
                output_bias=joined(prefix, "bias", "self_attn.o_proj"),
                mlp_norm=weight(prefix, "post_attention_layernorm"),
                gate_up=weight(prefix, "mlp.gate_proj", "mlp.up_proj"),
                gate_up_bias=joined(prefix, "bias", "mlp.gate_proj", "mlp.up_proj"),
                down=weight(prefix, "mlp.down_proj"),
                down_bias=joined(prefix, "bias", "mlp.down_proj"),
            )
        )
    embedding = weight("model.", "embed_tokens")
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=weight("model.", "norm"),
        head=embedding if config.tied_embeddings else weight("", "lm_head"),
    )
