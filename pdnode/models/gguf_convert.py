"""A llama.cpp GGUF file of a Llama model as a Hugging Face directory, dequantized to float32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import numpy
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL = 3  # token type of llama.cpp: special
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class _Tensor(Protocol):
    name: str
    data: NDArray[numpy.generic]
    tensor_type: GGMLQuantizationType


class _Metadata:
    """Typed reads of a GGUF file's key-value part; KeyError names a missing key."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def value(self, key: str) -> object:
        return self._fields[key].contents()

    def integer(self, key: str) -> int:
        return int(cast("int", self.value(key)))

    def texts(self, key: str) -> list[str]:
        return cast("list[str]", self.value(key))


def convert(gguf_file: Path, target: Path, progress: Callable[[float], None]) -> None:
    """Write config, weights, generation config and tokenizer of `gguf_file` into `target`.

    `progress` gets the share of the weights done, 0..1. ValueError where the file holds another
    architecture or tokenizer than we know how to write.
    """
    reader = GGUFReader(gguf_file)
    metadata = _Metadata(reader)
    for key, expected in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if metadata.value(key) != expected:
            raise ValueError(f"{key} is {metadata.value(key)!r}, expected {expected!r}")
    heads = metadata.integer("llama.attention.head_count")
    kv_heads = metadata.integer("llama.attention.head_count_kv")
    tensors: dict[str, NDArray[numpy.float32]] = {}
    for number, tensor in enumerate(cast("list[_Tensor]", reader.tensors)):
        name, weight = _hugging_face_name(tensor.name), dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            weight = _unpermuted(weight, heads)
        elif name.endswith("k_proj.weight"):
            weight = _unpermuted(weight, kv_heads)
        tensors[name] = numpy.ascontiguousarray(weight, dtype=numpy.float32)
        progress((number + 1) / len(reader.tensors))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    tied = "lm_head.weight" not in tensors
    _write_json(target / "config.json", _config(metadata, tied=tied))
    _write_json(
        target / "generation_config.json",
        {
            "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
            "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id"),
        },
    )
    _write_tokenizer(target, metadata)


def _hugging_face_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, layer, kind, rest = name.split(".")
    if block != "blk" or rest != "weight" or kind not in _LAYER_NAMES:
        raise ValueError(f"unknown tensor {name}")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def _unpermuted(weight: NDArray[numpy.float32], heads: int) -> NDArray[numpy.float32]:
    """Undo llama.cpp's row order of q and k: it interleaves the two halves of each head."""
    rows, columns = weight.shape
    split = weight.reshape(heads, rows // heads // 2, 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


def _config(metadata: _Metadata, *, tied: bool) -> dict[str, object]:
    hidden = metadata.integer("llama.embedding_length")
    heads = metadata.integer("llama.attention.head_count")
    epsilon = cast("float", metadata.value("llama.attention.layer_norm_rms_epsilon"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata.integer("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": metadata.integer("llama.context_length"),
        # The file holds float32: give back the decimal number that was meant.
        "rms_norm_eps": float(f"{epsilon:.6g}"),
        "rope_theta": cast("float", metadata.value("llama.rope.freq_base")),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _write_tokenizer(target: Path, metadata: _Metadata) -> None:
    tokens = metadata.texts("tokenizer.ggml.tokens")
    types = cast("list[int]", metadata.value("tokenizer.ggml.token_type"))
    merges: list[tuple[str, str]] = []
    for pair in metadata.texts("tokenizer.ggml.merges"):
        left, right = pair.split(" ")
        merges.append((left, right))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(target / "tokenizer.json"))

    def token(key: str) -> str:
        return tokens[metadata.integer(f"tokenizer.ggml.{key}")]

    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": metadata.integer("llama.context_length"),
            "bos_token": token("bos_token_id"),
            "eos_token": token("eos_token_id"),
            "unk_token": token("unknown_token_id"),
            "pad_token": token("padding_token_id"),
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata.value("tokenizer.chat_template"),
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
