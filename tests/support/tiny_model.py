"""Tiny random Llama checkpoints with a byte-level tokenizer, written without transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

VOCABULARY = 320
CONTEXT_TOKENS = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TURN = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = False,
    bias: bool = False,
    shards: int = 1,
) -> Path:
    """Write a checkpoint of about 0.3 M parameters to `path` (made if missing); returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    hidden, inner = heads * head_dim, 4 * heads * head_dim
    config = _config(
        hidden=hidden, inner=inner, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    ) | {"tie_word_embeddings": tied, "attention_bias": bias, "mlp_bias": bias}
    _write_json(path / "config.json", config)
    _write_json(
        path / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": END_OF_TURN, "pad_token_id": END_OF_TURN},
    )
    write_tiny_tokenizer(path)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        # Wide enough that greedy tokens depend on the whole context and have clear gaps.
        return torch.randn(*shape, generator=generator) * (2.0 / shape[-1] ** 0.5)

    tensors = {
        "model.embed_tokens.weight": random(VOCABULARY, hidden) * 4,
        "model.norm.weight": torch.ones(hidden),
    }
    if not tied:
        tensors["lm_head.weight"] = random(VOCABULARY, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = 1 + 0.1 * random(hidden)
        tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + 0.1 * random(hidden)
        for name, rows, columns in (
            ("self_attn.q_proj", heads * head_dim, hidden),
            ("self_attn.k_proj", kv_heads * head_dim, hidden),
            ("self_attn.v_proj", kv_heads * head_dim, hidden),
            ("self_attn.o_proj", hidden, heads * head_dim),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{prefix}{name}.weight"] = random(rows, columns)
            if bias:
                tensors[f"{prefix}{name}.bias"] = random(rows)
    _save(path, tensors, shards)
    return path


def _config(**sizes: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["inner"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": END_OF_TURN,
        "torch_dtype": "float32",
    }


def write_tiny_tokenizer(path: Path) -> None:
    """A byte-level tokenizer: three control tokens, the 256 bytes, a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    merges = []
    for left, right in (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ("a", "n")):
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _save(path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    _write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
