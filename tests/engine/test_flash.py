"""The FlashInfer back end over a stand-in that binds and checks every call: same answers as torch.

What is checked is what we plan: page tables, rows of mixed passes, strides, recorded tensors.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import AttentionBackend, Segment, TorchAttention
from pdnode.engine.flash import FlashAttention, FlashShape
from pdnode.engine.flash_limits import flash_problems
from pdnode.engine.flash_tables import FixedTables, Tables
from pdnode.memory.layout import LayerViews, region_views
from pdnode.models.config import load_config
from pdnode.models.decoder import Decoder
from pdnode.models.passes import LatentUp
from tests.support.flash_stand_in import StandIn
from tests.support.local_engine import LocalEngine, load_model
from tests.support.tiny_families import write_family
from tests.support.tiny_model import write_tiny_llama

PAGE_TOKENS, PAGES, LAYERS = 4, 64, 2
DECODE, PREFILL, LATENT = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
)


def gqa(kv_heads: int, dim: int = 8) -> KvGeometry:
    return KvGeometry("gqa", LAYERS, kv_heads, dim, PAGE_TOKENS, "float32", 1, PAGES)


def memory(geometry: KvGeometry) -> torch.Tensor:
    return torch.zeros(geometry.region_bytes, dtype=torch.uint8)


def workspace() -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


class Growing:
    """Four sequences that grow by random numbers of tokens, in pages in random order."""

    def __init__(self, seed: int) -> None:
        self._choice = random.Random(seed)
        self._free = list(range(PAGES))
        self._choice.shuffle(self._free)
        self._tables: list[list[int]] = [[] for _ in range(4)]
        self._known = [0] * 4

    def next_pass(self) -> list[Segment]:
        segments = []
        for place in self._choice.sample(range(4), self._choice.randint(1, 4)):
            count = self._choice.choice((1, 1, 2, 4, 7))
            start, table = self._known[place], self._tables[place]
            self._known[place] += count
            while len(table) * PAGE_TOKENS < self._known[place]:
                table.append(self._free.pop())
            segments.append(Segment(start, count, list(table)))
        return segments


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 2), (2, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_passes_equal_torch(seed: int, heads: int, kv_heads: int) -> None:
    """Decode rows stand before, behind and between those of prompts."""
    torch.manual_seed(seed)
    geometry = gqa(kv_heads)
    stores = memory(geometry), memory(geometry)
    plain = TorchAttention(region_views(stores[0], geometry), geometry, torch.float32)
    module = StandIn()
    shape = FlashShape(heads, geometry.head_dim**-0.5)
    flash = FlashAttention(module, region_views(stores[1], geometry), geometry, shape, workspace())
    growing = Growing(seed)
    for _ in range(6):
        segments = growing.next_pass()
        rows = sum(segment.count for segment in segments)
        for back_end in (plain, flash):
            back_end.plan(segments)
        for layer in range(LAYERS):
            # As the model has them: parts of one matrix, so not contiguous.
            joint = torch.randn(rows, heads + 2 * kv_heads, geometry.head_dim)
            parts = joint.split([heads, kv_heads, kv_heads], dim=1)
            torch.testing.assert_close(flash.run(layer, *parts), plain.run(layer, *parts))
    assert torch.equal(*stores)
    assert module.planned[DECODE] > 0
    assert module.planned[PREFILL] > 0


@pytest.mark.parametrize("seed", range(4))
def test_mixed_passes_over_latents_equal_torch(seed: int) -> None:
    torch.manual_seed(seed)
    heads, latent, plain_dim, turned, values = 4, 8, 6, 4, 5
    geometry = KvGeometry("mla", LAYERS, 1, latent + turned, PAGE_TOKENS, "float32", 1, PAGES)
    up = LatentUp(torch.randn(heads, plain_dim, latent), torch.randn(heads, values, latent), 0.3)
    stores = memory(geometry), memory(geometry)
    plain = TorchAttention(region_views(stores[0], geometry), geometry, torch.float32)
    module = StandIn()
    shape = FlashShape(heads, up.scale, latent)
    flash = FlashAttention(module, region_views(stores[1], geometry), geometry, shape, workspace())
    growing = Growing(seed)
    for _ in range(6):
        segments = growing.next_pass()
        rows = sum(segment.count for segment in segments)
        queries = torch.randn(rows, heads, plain_dim + turned)
        latents = torch.randn(rows, latent + turned)
        for back_end in (plain, flash):
            back_end.plan(segments)
        for layer in range(LAYERS):
            found = flash.run_latent(layer, queries, latents, up)
            torch.testing.assert_close(found, plain.run_latent(layer, queries, latents, up))
    assert torch.equal(*stores)
    assert module.planned == {LATENT: 6}


def test_a_pass_is_planned_once_for_all_layers() -> None:
    geometry, module = gqa(2), StandIn()
    views = region_views(memory(geometry), geometry)
    flash = FlashAttention(module, views, geometry, FlashShape(4, 1.0), workspace())
    flash.plan([Segment(0, 3, [5]), Segment(4, 1, [1, 2])])
    for layer in range(LAYERS):
        flash.run(layer, torch.randn(4, 4, 8), *torch.randn(2, 4, 2, 8))
    assert module.planned == {DECODE: 1, PREFILL: 1}


def test_tables_by_hand() -> None:
    """Pages of four tokens: 5 tokens are a full page and one with one token; 4 are a full page."""
    tables = Tables.of([Segment(4, 1, [9, 2, 7]), Segment(0, 4, [3])], gqa(2))
    assert tables.indptr.tolist() == [0, 2, 3]
    assert tables.indices.tolist() == [9, 2, 3]
    assert tables.last.tolist() == [1, 4]
    assert tables.lengths.tolist() == [5, 4]
    part = tables.part(1, 2)
    assert (part.indptr.tolist(), part.indices.tolist()) == ([0, 1], [3])
    assert {array.dtype.name for array in (tables.indptr, tables.last, part.indptr)} == {"int32"}


def test_recorded_tables_stay_where_they_are() -> None:
    """What a replay would read is in the same memory for every pass, and new in it."""
    geometry, module = gqa(2), StandIn()
    views = region_views(memory(geometry), geometry)
    fixed = FixedTables(2, 8, torch.device("cpu"))
    flash = FlashAttention(module, views, geometry, FlashShape(4, 1.0), workspace(), fixed=fixed)
    flash.plan([Segment(0, 1, [0]), Segment(0, 1, [0])])
    watched = (fixed.positions, fixed.indptr, fixed.indices, fixed.last, fixed.sequences)
    before = [tensor.data_ptr() for tensor in watched]
    flash.plan([Segment(5, 1, [6, 3]), Segment(8, 1, [1, 2, 4])])
    assert [tensor.data_ptr() for tensor in watched] == before
    assert fixed.positions.tolist() == [5, 8]
    assert fixed.indptr.tolist() == [0, 2, 5]
    assert fixed.indices.tolist()[:5] == [6, 3, 1, 2, 4]
    assert fixed.last.tolist() == [2, 1]
    assert fixed.sequences.tolist() == [0, 1]
    with pytest.raises(AssertionError, match="fixed number of rows"):
        flash.plan([Segment(0, 1, [0])])


def over(module: StandIn, model: Decoder) -> Callable[..., AttentionBackend]:
    def attend(views: list[LayerViews], geometry: KvGeometry) -> AttentionBackend:
        shape = FlashShape.of(model.config, tp=model.ranks.tp)
        return FlashAttention(module, views, geometry, shape, workspace())

    return attend


@pytest.mark.parametrize("family", ["llama", "qwen3 tied yarn", "deepseek_v3"])
def test_models_answer_as_over_torch(family: str, tmp_path: Path) -> None:
    """Prompts in chunks beside others that decode; chunks end within pages and beyond them."""
    model = load_model(write_family(tmp_path, family))
    prompts = [[3 + (7 * n) % 300 for n in range(45)], [9], [(11 * n) % 320 for n in range(21)]]
    flash = LocalEngine(model, pages=64, attend=over(StandIn(), model))
    plain = LocalEngine(model, pages=64)
    assert flash.generate(prompts, 6, chunk=16) == plain.generate(prompts, 6, chunk=16)
    for found, wanted in zip(
        flash.logits(prompts, [7, 30, 1, 20, 1]), plain.logits(prompts, [45]), strict=True
    ):
        assert float((found - wanted).abs().max() / wanted.std()) < 3e-5


def test_what_flashinfer_has_no_kernels_for_is_refused(tmp_path: Path) -> None:
    small = load_config(write_tiny_llama(tmp_path / "small"))
    (problem,) = flash_problems(small, tp=1, pass_tokens=512)
    assert str(problem) == "config.json head_dim: 16; FlashInfer has kernels for 64, 128, 256"
    fits = load_config(write_tiny_llama(tmp_path / "fits", head_dim=64))
    assert flash_problems(fits, tp=1, pass_tokens=512) == []
    latent = load_config(write_family(tmp_path / "latent", "deepseek_v3"))
    texts = [str(problem) for problem in flash_problems(latent, tp=1, pass_tokens=200_000)]
    assert texts == [
        "config.json (kv_lora_rank, qk_rope_head_dim): (32, 16); FlashInfer has kernels for "
        "(512, 64)",
        "config.json num_attention_heads: 12 a rank; FlashInfer's MLA takes powers of two up to "
        "128",
        "[engine] chunk_tokens: 200000 tokens a pass; FlashInfer's MLA takes 170666 with 12 heads",
    ]
