"""config.json: both spellings are read, everything unsupported is refused by name."""

import json
from pathlib import Path

import pytest

from pdnode.errors import ConfigError
from pdnode.models.config import load_config, parse_config
from pdnode.models.ropeconfig import RopeScaling

BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def without(key: str) -> dict[str, object]:
    return {name: value for name, value in BASE.items() if name != key}


def problems(raw: dict[str, object]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    return {p.where.removeprefix("config.json: "): p.text for p in caught.value.problems}


def test_a_plain_model() -> None:
    config = parse_config(BASE)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert (config.vocabulary, config.hidden, config.intermediate) == (100, 64, 128)
    assert config.context_tokens == 512
    assert config.rope_theta == 5000.0
    assert config.rope_scaling == RopeScaling()
    assert not config.tied_embeddings
    assert config.dtype == "float32"


def test_defaults_of_the_format() -> None:
    config = parse_config(without("num_key_value_heads") | {"head_dim": 32, "rms_norm_eps": None})
    assert config.kv_heads == 4
    assert config.head_dim == 32
    assert config.rms_epsilon == 1e-6


def test_version_5_spelling_of_rope_and_dtype() -> None:
    raw = without("rope_theta") | {
        "rope_parameters": {"rope_theta": 250.0, "rope_type": "default"},
        "dtype": "bfloat16",
    }
    config = parse_config(raw)
    assert config.rope_theta == 250.0
    assert config.rope_scaling.kind == "none"
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_in_both_spellings(spelling: str) -> None:
    config = parse_config(BASE | {spelling: LLAMA3 | {"rope_type": "llama3"}})
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert config.rope_theta == 5000.0


def test_linear_scaling_in_its_oldest_spelling() -> None:
    config = parse_config(BASE | {"rope_scaling": {"type": "linear", "factor": 4}})
    assert config.rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("sliding_window", 4096, "sliding windows are not supported"),
        ("quantization_config", {"bits": 4}, "quantized checkpoints are not supported"),
        ("hidden_act", "gelu", "'gelu' is not supported; allowed: silu"),
        ("layer_types", ["full_attention", "sliding_attention"], "only full_attention"),
        ("partial_rotary_factor", 0.5, "only 1.0"),
        ("num_key_value_heads", 3, "3 does not divide 4 heads"),
        ("head_dim", 15, "15 is odd"),
        ("num_hidden_layers", True, "True is not a positive integer"),
        ("num_hidden_layers", 0, "0 is not a positive integer"),
        ("vocab_size", None, "None is not a positive integer"),
        ("hidden_size", 66, "66 is no multiple of 4 heads"),
        ("rms_norm_eps", "tiny", "'tiny' is not a positive number"),
        ("tie_word_embeddings", 1, "1 is neither true nor false"),
        ("torch_dtype", "float8", "'float8' is not supported; allowed: float32, bfloat16"),
        ("rope_scaling", ["yarn"], "is not an object"),
    ],
)
def test_refused_by_name(key: str, value: object, part: str) -> None:
    found = problems(BASE | {key: value})
    name = "dtype" if key == "torch_dtype" else key
    assert part in found[name]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("scaling", "key", "part"),
    [
        ({"rope_type": "dynamic"}, "rope_type", "'dynamic' is not supported; allowed: default, "),
        ({"rope_type": "yarn", "factor": 0}, "factor", "0 is not a positive number"),
        ({"rope_type": "yarn", "partial_rotary_factor": 0.5}, "partial_rotary_factor", "only 1.0"),
        ({"rope_type": "linear"}, "factor", "None is not a positive number"),
        (
            LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1.0},
            "high_freq_factor",
            "not above",
        ),
    ],
)
def test_rope_problems_name_the_inner_key(scaling: dict[str, object], key: str, part: str) -> None:
    assert part in problems(BASE | {"rope_scaling": scaling})[f"rope_scaling.{key}"]


QWEN3: dict[str, object] = BASE | {"architectures": ["Qwen3ForCausalLM"]}
QWEN3_MOE: dict[str, object] = BASE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
DEEPSEEK: dict[str, object] = BASE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}


def test_a_window_that_is_not_used_is_none() -> None:
    """Qwen names one and uses none unless a second key says so."""
    assert parse_config(QWEN3 | {"sliding_window": 4096}).qk_norm
    found = problems(QWEN3 | {"sliding_window": 4096, "use_sliding_window": True})
    assert found == {"sliding_window": "sliding windows are not supported"}


def test_experts_in_some_layers() -> None:
    config = parse_config(QWEN3_MOE | {"mlp_only_layers": [2]})
    assert [config.has_experts(layer) for layer in range(3)] == [True, True, False]
    config = parse_config(QWEN3_MOE | {"decoder_sparse_step": 2})
    assert [config.has_experts(layer) for layer in range(3)] == [False, True, False]
    config = parse_config(DEEPSEEK)
    assert [config.has_experts(layer) for layer in range(3)] == [False, True, True]
    assert config.experts is not None
    assert config.experts.shared_intermediate == 128


def test_the_latent_is_what_is_kept() -> None:
    config = parse_config(DEEPSEEK)
    assert config.latent is not None
    assert (config.latent.query_rank, config.latent.interleaved) == (0, True)
    geometry = config.kv_geometry(tp=2, page_tokens=16, pages=3)
    assert (geometry.kind, geometry.kv_heads, geometry.head_dim) == ("mla", 1, 40)
    assert geometry.region_bytes == 3 * 3 * 16 * 40 * 4


@pytest.mark.parametrize(
    ("base", "key", "value", "part"),
    [
        (QWEN3_MOE, "num_experts_per_tok", 9, "9 of 8 experts"),
        (QWEN3_MOE, "mlp_only_layers", [True], "is not a list of integers"),
        (QWEN3_MOE, "decoder_sparse_step", 0, "0 is not a positive integer"),
        (DEEPSEEK, "scoring_func", "softmax", "'softmax' is not supported; allowed: sigmoid"),
        (DEEPSEEK, "topk_method", "greedy", "'greedy' is not supported; allowed: noaux_tc"),
        (DEEPSEEK, "moe_layer_freq", 2, "2 is not supported; allowed: 1"),
        (DEEPSEEK, "n_group", 3, "3 groups of 8 experts"),
        (DEEPSEEK, "topk_group", 5, "5 of 4 groups"),
        (DEEPSEEK, "num_experts_per_tok", 5, "5 of 4 experts in topk_group"),
        (DEEPSEEK, "qk_rope_head_dim", 7, "7 is odd"),
        (DEEPSEEK, "n_shared_experts", -1, "-1 is not an integer of at least 0"),
        (
            DEEPSEEK,
            "quantization_config",
            {"quant_method": "fp8"},
            "quantized checkpoints (fp8) are not supported",
        ),
    ],
)
def test_what_families_refuse_by_name(
    base: dict[str, object], key: str, value: object, part: str
) -> None:
    found = problems(base | {key: value})
    assert part in found[key]
    assert len(found) == 1


@pytest.mark.parametrize("architectures", [["MistralForCausalLM"], [], None, "LlamaForCausalLM"])
def test_other_architectures_are_refused(architectures: object) -> None:
    found = problems(BASE | {"architectures": architectures})
    assert "allowed: LlamaForCausalLM" in found["architectures"]


def test_all_problems_at_once() -> None:
    found = problems(BASE | {"sliding_window": 1, "vocab_size": -1, "rms_norm_eps": "x"})
    assert sorted(found) == ["rms_norm_eps", "sliding_window", "vocab_size"]


def test_files_that_are_no_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        load_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: is not JSON"):
        load_config(tmp_path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        load_config(tmp_path)
    path.write_text(json.dumps(BASE))
    assert load_config(tmp_path).layers == 3


@pytest.mark.parametrize(
    ("tp", "texts"),
    [
        (1, []),
        (2, []),
        (4, []),
        (
            3,
            [
                "attention heads 4 is no multiple of 3",
                "intermediate_size 128 is no multiple of 3",
                "2 KV heads can be neither cut nor copied over 3 ranks",
            ],
        ),
        (8, ["attention heads 4 is no multiple of 8"]),
    ],
)
def test_what_a_tp_group_cannot_share_is_named_with_both_numbers(tp: int, texts: list[str]) -> None:
    assert [problem.text for problem in parse_config(BASE).tp_problems(tp)] == texts


def test_every_rank_has_a_part_of_the_vocabulary() -> None:
    """Ranks take 2 rows each: of 5 none is left for the last of four, of 7 there is one."""
    assert not parse_config(BASE | {"vocab_size": 7}).tp_problems(4)
    (problem,) = parse_config(BASE | {"vocab_size": 5}).tp_problems(4)
    assert problem.text == "a vocabulary of 5 leaves one of 4 ranks without"
