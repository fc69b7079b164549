"""config.json of a Hugging Face directory as a frozen record; the unsupported, refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdnode.core.geometry import KvGeometry
from pdnode.errors import ConfigError, Problem
from pdnode.models.parts import part_of
from pdnode.models.rawconfig import Reader, read_json
from pdnode.models.ropeconfig import RopeScaling, parse_rope

LLAMA = "LlamaForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
QWEN3_MOE = "Qwen3MoeForCausalLM"
DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
ARCHITECTURES = (LLAMA, QWEN3, QWEN3_MOE, DEEPSEEK_V3)
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention (MLA): queries and keys of a head have a plain and a rotary part."""

    query_rank: int  # of the joint of queries; 0: there is none
    kv_rank: int  # of the latent that keys and values come from
    plain_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool  # the rotary parts lie in pairs on disk


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in the place of the feed-forward block of some layers."""

    count: int
    per_token: int
    intermediate: int  # of one expert
    shared_intermediate: int  # of the block that every token goes through; 0: there is none
    dense_layers: frozenset[int]  # that have none
    normalized: bool  # weights of the chosen experts sum to one
    grouped: bool = False
    """Sigmoid scores, chosen with a bias among the best `groups_per_token` groups of experts;
    else softmax over all experts."""
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0  # of the weights


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary positions, attention with few KV heads or a latent, SwiGLU."""

    architecture: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    context_tokens: int
    rms_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str  # of the checkpoint
    qk_norm: bool = False  # queries and keys are normalized per head
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    extra_layers: int = 0  # that the checkpoint holds after the last one, for speculation

    def kv_geometry(
        self, *, tp: int = 1, page_tokens: int = 1, dtype: str = "float32", pages: int = 1
    ) -> KvGeometry:
        """How `tp` ranks keep this model's KV; `tp` has passed `tp_problems`."""
        latent = self.latent
        return KvGeometry(
            kind="mla" if latent else "gqa",
            layers=self.layers,
            kv_heads=1 if latent else self.kv_heads,
            head_dim=latent.kv_rank + latent.rope_dim if latent else self.head_dim,
            page_tokens=page_tokens,
            dtype=dtype,
            tp=tp,
            pages=pages,
        )

    @property
    def attention_scale(self) -> float:
        """Of the scores, before the softmax."""
        factor = self.rope_scaling.softmax_factor if self.latent else 1.0
        return float(self.head_dim**-0.5 * factor)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def tp_problems(self, tp: int) -> list[Problem]:
        """Why this model cannot be cut over `tp` ranks, with both numbers; empty if it can."""
        cut = {"attention heads": self.heads}
        if not all(self.has_experts(layer) for layer in range(self.layers)):
            cut["intermediate_size"] = self.intermediate
        if self.experts is not None:
            cut["moe_intermediate_size"] = self.experts.intermediate
        found = [f"{what} {size} is no multiple of {tp}" for what, size in cut.items() if size % tp]
        if self.latent is None and self.kv_heads % tp and tp % self.kv_heads:
            found.append(f"{self.kv_heads} KV heads can be neither cut nor copied over {tp} ranks")
        if not part_of(self.vocabulary, rank=tp - 1, tp=tp):
            found.append(f"a vocabulary of {self.vocabulary} leaves one of {tp} ranks without")
        return [Problem("engine.tp", text) for text in found]


def load_config(model_path: Path) -> ModelConfig:
    """Read `model_path`/config.json. ConfigError carries every problem found."""
    return parse_config(read_json(model_path / "config.json"))


def parse_config(raw: Mapping[str, object]) -> ModelConfig:
    """`raw` as a ModelConfig. ConfigError carries every problem found, each with its key."""
    reader = Reader(raw)
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        reader.problem("architectures", f"{architectures!r} is not supported; allowed: {allowed}")
        raise ConfigError(reader.problems)
    assert isinstance(architecture, str)
    _refuse_unsupported(reader, architecture)
    context_tokens = reader.integer("max_position_embeddings")
    theta, scaling = parse_rope(reader, context_tokens)
    latent = _latent(reader) if architecture == DEEPSEEK_V3 else None
    heads, kv_heads, head_dim = _heads(reader, latent)
    layers = reader.integer("num_hidden_layers")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        reader.problem("dtype", f"{dtype!r} is not supported; allowed: {', '.join(_DTYPES)}")
    config = ModelConfig(
        architecture=architecture,
        vocabulary=reader.integer("vocab_size"),
        hidden=reader.integer("hidden_size"),
        intermediate=reader.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=context_tokens,
        rms_epsilon=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=reader.flag("tie_word_embeddings"),
        attention_bias=reader.flag("attention_bias"),
        mlp_bias=architecture == LLAMA and reader.flag("mlp_bias"),
        dtype=str(dtype),
        qk_norm=architecture in (QWEN3, QWEN3_MOE),
        latent=latent,
        experts=_experts(reader, architecture, layers),
        extra_layers=reader.integer("num_nextn_predict_layers", 0, least=0),
    )
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


def _refuse_unsupported(reader: Reader, architecture: str) -> None:
    """Keys that change the answer and that this engine does not honour."""
    raw = reader.raw
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        named = f" ({method})" if method else ""
        reader.problem("quantization_config", f"quantized checkpoints{named} are not supported")
    # Qwen names a window and says beside it whether there is one: by default there is none.
    used = architecture not in (QWEN3, QWEN3_MOE)
    if reader.has("sliding_window") and reader.flag("use_sliding_window", default=used):
        reader.problem("sliding_window", "sliding windows are not supported")
    reader.only("hidden_act", "silu")
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        reader.problem("layer_types", "only full_attention is supported")


def _heads(reader: Reader, latent: LatentConfig | None) -> tuple[int, int, int]:
    """(query heads, KV heads, head dimension). With a latent, every head has keys of its own."""
    heads = reader.integer("num_attention_heads")
    if latent is not None:
        return heads, heads, latent.plain_dim + latent.rope_dim
    hidden = reader.integer("hidden_size")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        reader.problem("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if not reader.has("head_dim") and hidden % heads:
        reader.problem("hidden_size", f"{hidden} is no multiple of {heads} heads")
    head_dim = reader.integer("head_dim", hidden // heads)
    if head_dim % 2:
        reader.problem("head_dim", f"{head_dim} is odd; rotary positions need an even one")
    return heads, kv_heads, head_dim


def _latent(reader: Reader) -> LatentConfig:
    rope_dim = reader.integer("qk_rope_head_dim")
    if rope_dim % 2:
        reader.problem("qk_rope_head_dim", f"{rope_dim} is odd; rotary positions need an even one")
    return LatentConfig(
        query_rank=reader.integer("q_lora_rank") if reader.has("q_lora_rank") else 0,
        kv_rank=reader.integer("kv_lora_rank"),
        plain_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=reader.integer("v_head_dim"),
        interleaved=reader.flag("rope_interleave", default=True),
    )


def _experts(reader: Reader, architecture: str, layers: int) -> ExpertsConfig | None:
    if architecture == QWEN3_MOE:
        return _softmax_experts(reader, layers)
    return _grouped_experts(reader, layers) if architecture == DEEPSEEK_V3 else None


def _softmax_experts(reader: Reader, layers: int) -> ExpertsConfig:
    # Published checkpoints have the first name; transformers 5 writes the second.
    count = reader.integer("num_experts" if reader.has("num_experts") else "num_local_experts")
    step = reader.integer("decoder_sparse_step", 1)
    dense = set(reader.integers("mlp_only_layers"))
    dense |= {layer for layer in range(layers) if (layer + 1) % step}
    return ExpertsConfig(
        count=count,
        per_token=_at_most(reader, "num_experts_per_tok", count, "experts"),
        intermediate=reader.integer("moe_intermediate_size"),
        shared_intermediate=0,
        dense_layers=frozenset(dense),
        normalized=reader.flag("norm_topk_prob"),
    )


def _grouped_experts(reader: Reader, layers: int) -> ExpertsConfig:
    reader.only("scoring_func", "sigmoid")
    reader.only("topk_method", "noaux_tc")
    reader.only("moe_layer_freq", 1)
    count = reader.integer("n_routed_experts")
    groups = reader.integer("n_group", 1)
    chosen = _at_most(reader, "topk_group", groups, "groups")
    if count % groups or count // groups < 2:
        text = f"{groups} groups of {count} experts: each needs as many, and two at least"
        reader.problem("n_group", text)
        groups = chosen = 1
    in_groups = chosen * (count // groups)
    intermediate = reader.integer("moe_intermediate_size")
    first = reader.integer("first_k_dense_replace", 0, least=0)
    return ExpertsConfig(
        count=count,
        per_token=_at_most(reader, "num_experts_per_tok", in_groups, "experts in topk_group"),
        intermediate=intermediate,
        shared_intermediate=reader.integer("n_shared_experts", 0, least=0) * intermediate,
        dense_layers=frozenset(range(min(layers, first))),
        normalized=reader.flag("norm_topk_prob", default=True),
        grouped=True,
        groups=groups,
        groups_per_token=chosen,
        scale=reader.number("routed_scaling_factor", 1.0),
    )


def _at_most(reader: Reader, key: str, most: int, what: str) -> int:
    value = reader.integer(key)
    if value > most:
        reader.problem(key, f"{value} of {most} {what}")
    return min(value, most)
