"""config.json of a Hugging Face directory as a frozen record; the unsupported, refused by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdnode.core.geometry import KvGeometry
from pdnode.errors import ConfigError, Problem
from pdnode.models.parts import part_of

ARCHITECTURES = ("LlamaForCausalLM",)
_MAX_CONFIG_BYTES = 4 << 20
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind`: "none", "linear" or "llama3"."""

    kind: str = "none"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama model: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    architecture: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    rms_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str  # of the checkpoint
    qk_norm: bool = False

    def kv_geometry(
        self, *, tp: int = 1, page_tokens: int = 1, dtype: str = "float32", pages: int = 1
    ) -> KvGeometry:
        """How `tp` ranks keep this model's KV; `tp` has passed `tp_problems`."""
        return KvGeometry(
            kind="gqa",
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_tokens=page_tokens,
            dtype=dtype,
            tp=tp,
            pages=pages,
        )

    def tp_problems(self, tp: int) -> list[Problem]:
        """Why this model cannot be cut over `tp` ranks, with both numbers; empty if it can."""
        cut = (("attention heads", self.heads), ("intermediate_size", self.intermediate))
        found = [f"{what} {number} is no multiple of {tp}" for what, number in cut if number % tp]
        if self.kv_heads % tp and tp % self.kv_heads:
            found.append(f"{self.kv_heads} KV heads can be neither cut nor copied over {tp} ranks")
        if not part_of(self.vocabulary, rank=tp - 1, tp=tp):
            found.append(f"a vocabulary of {self.vocabulary} leaves one of {tp} ranks without")
        return [Problem("[engine] tp", text) for text in found]


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from `path`; ConfigError names the file and what is wrong with it."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError([Problem(str(path), f"larger than {_MAX_CONFIG_BYTES} bytes")])
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    except ValueError as error:
        raise ConfigError([Problem(str(path), f"is not JSON: {error}")]) from error
    if not isinstance(value, dict):
        raise ConfigError([Problem(str(path), "is not a JSON object")])
    return value


def load_config(model_path: Path) -> ModelConfig:
    """Read `model_path`/config.json. ConfigError carries every problem found."""
    return parse_config(read_json(model_path / "config.json"))


def parse_config(raw: Mapping[str, object]) -> ModelConfig:
    """`raw` as a ModelConfig. ConfigError carries every problem found, each with its key."""
    reader = _Reader(raw)
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        reader.problem("architectures", f"{architectures!r} is not supported; allowed: {allowed}")
        raise ConfigError(reader.problems)
    _refuse_unsupported(reader)
    theta, scaling = _rope(reader)
    heads = reader.integer("num_attention_heads")
    hidden = reader.integer("hidden_size")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        reader.problem("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if raw.get("head_dim") is None and hidden % heads:
        reader.problem("hidden_size", f"{hidden} is no multiple of {heads} heads")
    head_dim = reader.integer("head_dim", hidden // heads)
    if head_dim % 2:
        reader.problem("head_dim", f"{head_dim} is odd; rotary positions need an even one")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        reader.problem("dtype", f"{dtype!r} is not supported; allowed: {', '.join(_DTYPES)}")
    config = ModelConfig(
        architecture=str(architecture),
        vocabulary=reader.integer("vocab_size"),
        hidden=hidden,
        intermediate=reader.integer("intermediate_size"),
        layers=reader.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=reader.integer("max_position_embeddings"),
        rms_epsilon=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=reader.flag("tie_word_embeddings"),
        attention_bias=reader.flag("attention_bias"),
        mlp_bias=reader.flag("mlp_bias"),
        dtype=str(dtype),
    )
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


class _Reader:
    """Typed access to a JSON object; collects problems and goes on with a harmless value."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self.raw = raw
        self.problems: list[Problem] = []

    def problem(self, key: str, text: str) -> None:
        self.problems.append(Problem(f"config.json: {key}", text))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problem(key, f"{value!r} is not a positive integer")
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.problem(key, f"{value!r} is not a positive number")
            return 1.0
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.problem(key, f"{value!r} is neither true nor false")
        return value is True


def _refuse_unsupported(reader: _Reader) -> None:
    """Keys that change the answer and that this engine does not honour."""
    raw = reader.raw
    if raw.get("quantization_config") is not None:
        reader.problem("quantization_config", "quantized checkpoints are not supported")
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False:
        reader.problem("sliding_window", "sliding windows are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        reader.problem("hidden_act", f"{raw['hidden_act']!r} is not supported; allowed: silu")
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        reader.problem("layer_types", "only full_attention is supported")


def _rope(reader: _Reader) -> tuple[float, RopeScaling]:
    """(theta, scaling) from `rope_parameters`, or from the older `rope_theta` + `rope_scaling`."""
    parameters = reader.raw.get("rope_parameters")
    key = "rope_parameters"
    if parameters is None:
        key = "rope_scaling"
        parameters = reader.raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        reader.problem(key, f"{parameters!r} is not an object")
        return 1.0, RopeScaling()
    if reader.raw.get("partial_rotary_factor", 1.0) != 1.0:
        reader.problem("partial_rotary_factor", "only 1.0 is supported")
    inner = _Reader(parameters)
    outer = reader if parameters.get("rope_theta") is None else inner
    theta = outer.number("rope_theta", 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    scaling = RopeScaling()
    if kind == "linear":
        scaling = RopeScaling("linear", inner.number("factor"))
    elif kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            inner.number("factor"),
            inner.number("low_freq_factor"),
            inner.number("high_freq_factor"),
            inner.integer("original_max_position_embeddings"),
        )
        if scaling.high_frequency_factor <= scaling.low_frequency_factor:
            inner.problem("high_freq_factor", "is not above low_freq_factor")
    elif kind != "default":
        inner.problem("rope_type", f"{kind!r} is not supported; allowed: default, linear, llama3")
    for problem in inner.problems:
        reader.problem(f"{key}.{problem.where.removeprefix('config.json: ')}", problem.text)
    return theta, scaling
