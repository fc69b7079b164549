"""Tiny random checkpoints of every family, written by transformers, and the logits it gives them.

float32, a few shards with an index, the byte-level tokenizer of tiny_model. Numbers are wide enough
that the answer depends on the whole context, and nothing is at a value that would hide a mistake:
norms are not one, biases and the routers' correction are not zero.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.support.tiny_model import CONTEXT_TOKENS, END_OF_TURN, VOCABULARY, write_tiny_tokenizer

_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT_TOKENS,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "hidden_size": 96,
    "intermediate_size": 144,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": END_OF_TURN,
    "pad_token_id": END_OF_TURN,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MLA = {
    "num_key_value_heads": 12,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
}
_MOE = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": (
        "LlamaConfig",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "llama tied llama3": (
        "LlamaConfig",
        {"num_key_value_heads": 3, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "llama one KV head": (
        "LlamaConfig",
        {
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        },
    ),
    "qwen3 tied yarn": (
        "Qwen3Config",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", _MOE),
    "qwen3_moe sparse": (
        "Qwen3MoeConfig",
        _MOE
        | {
            "num_key_value_heads": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", _MLA),
    "deepseek_v3 plain": (
        "DeepseekV3Config",
        _MLA
        | {
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


def write_family(
    path: Path, family: str, *, seed: int = 0, changes: dict[str, object] | None = None
) -> Path:
    """Write the checkpoint of one of FAMILIES to `path` (made if missing); returns `path`."""
    name, sizes = FAMILIES[family]
    config: PretrainedConfig = getattr(transformers, name)(**_COMMON | sizes | (changes or {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    for key, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor is embedding or tensor.data_ptr() == embedding.data_ptr():
            tensor.copy_(noise * (0.5 if config.tie_word_embeddings else 4.0))
        elif tensor.ndim >= 2:
            tensor.copy_(noise * (2.0 / tensor.shape[-1] ** 0.5))
        elif key.endswith("norm.weight"):
            tensor.copy_(1 + 0.1 * noise)
        else:
            tensor.copy_(0.3 * noise)
    model.save_pretrained(path, max_shard_size="300KB")
    write_tiny_tokenizer(path)
    return path


def reference_logits(path: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits of transformers, [tokens, vocabulary] for each prompt on its own."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return [model(torch.tensor([list(prompt)])).logits[0] for prompt in prompts]


def with_old_rope_spelling(path: Path) -> dict[str, object]:
    """The checkpoint's config.json as versions before 5 wrote it."""
    raw: dict[str, object] = json.loads((path / "config.json").read_text())
    parameters = raw.pop("rope_parameters")
    assert isinstance(parameters, dict)
    raw["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else parameters | {"type": kind}
    raw["torch_dtype"] = raw.pop("dtype")
    return raw
