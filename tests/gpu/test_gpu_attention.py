"""FlashInfer's own kernels over our plans, against torch in float32 on the CPU."""

import importlib
import random

import pytest
import torch

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import Segment, TorchAttention
from pdnode.engine.flash import WORKSPACE_BYTES, FlashAttention, FlashShape
from pdnode.engine.flash_sampler import FlashSampler
from pdnode.engine.sampler import sample
from pdnode.memory.layout import region_views
from pdnode.models.passes import LatentUp
from tests.support.local_engine import GREEDY

PAGE_TOKENS, PAGES, LAYERS = 64, 32, 2
LATENT, TURNED, PLAIN, VALUES = 512, 64, 128, 128
MOST_DIFFERENCE = 0.03  # bfloat16: three digits


def on_gpu() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda:0")


def memory(geometry: KvGeometry, device: str) -> torch.Tensor:
    return torch.zeros(geometry.region_bytes, dtype=torch.uint8, device=device)


def passes(seed: int) -> list[list[Segment]]:
    """Prompts, chunks and single rows of three sequences, mixed."""
    choice = random.Random(seed)
    free = list(range(PAGES))
    choice.shuffle(free)
    known, tables = [0] * 3, [[free.pop() for _ in range(8)] for _ in range(3)]
    found = []
    for _ in range(5):
        segments = []
        for place in choice.sample(range(3), choice.randint(1, 3)):
            count = choice.choice((1, 1, 7, 64, 90))
            segments.append(Segment(known[place], count, tables[place]))
            known[place] += count
        found.append(segments)
    return found


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found.float().cpu() - wanted).abs().max()) < MOST_DIFFERENCE * 4
    both = torch.stack((found.float().cpu().flatten(), wanted.flatten()))
    assert float(torch.corrcoef(both)[0, 1]) > 0.999


def rounded(*shape: int) -> torch.Tensor:
    """float32 numbers that bfloat16 has too."""
    return torch.randn(*shape).bfloat16().float()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 64)])
def test_mixed_passes(heads: int, kv_heads: int, dim: int) -> None:
    torch.manual_seed(0)
    short = KvGeometry("gqa", LAYERS, kv_heads, dim, PAGE_TOKENS, "bfloat16", 1, PAGES)
    exact = KvGeometry("gqa", LAYERS, kv_heads, dim, PAGE_TOKENS, "float32", 1, PAGES)
    plain = TorchAttention(region_views(memory(exact, "cpu"), exact), exact, torch.float32)
    flash = FlashAttention(
        importlib.import_module("flashinfer"),
        region_views(memory(short, "cuda:0"), short),
        short,
        FlashShape(heads, dim**-0.5),
        on_gpu(),
    )
    for segments in passes(heads):
        rows = sum(segment.count for segment in segments)
        plain.plan(segments)
        flash.plan(segments)
        for layer in range(LAYERS):
            parts = rounded(rows, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
            wanted = plain.run(layer, *parts)
            close(flash.run(layer, *(part.bfloat16().cuda() for part in parts)), wanted)


def test_mixed_passes_over_latents() -> None:
    torch.manual_seed(0)
    heads = 16
    up = LatentUp(
        rounded(heads, PLAIN, LATENT) / 8, rounded(heads, VALUES, LATENT) / 8, LATENT**-0.5
    )
    short = KvGeometry("mla", LAYERS, 1, LATENT + TURNED, PAGE_TOKENS, "bfloat16", 1, PAGES)
    exact = KvGeometry("mla", LAYERS, 1, LATENT + TURNED, PAGE_TOKENS, "float32", 1, PAGES)
    plain = TorchAttention(region_views(memory(exact, "cpu"), exact), exact, torch.float32)
    flash = FlashAttention(
        importlib.import_module("flashinfer"),
        region_views(memory(short, "cuda:0"), short),
        short,
        FlashShape(heads, up.scale, LATENT),
        on_gpu(),
    )
    there = LatentUp(up.keys.bfloat16().cuda(), up.values.bfloat16().cuda(), up.scale)
    for segments in passes(1):
        rows = sum(segment.count for segment in segments)
        queries, latents = rounded(rows, heads, PLAIN + TURNED) / 8, rounded(rows, LATENT + TURNED)
        plain.plan(segments)
        flash.plan(segments)
        for layer in range(LAYERS):
            wanted = plain.run_latent(layer, queries, latents, up)
            found = flash.run_latent(
                layer, queries.bfloat16().cuda(), latents.bfloat16().cuda(), there
            )
            both = torch.stack((found.float().cpu().flatten(), wanted.flatten()))
            assert float(torch.corrcoef(both)[0, 1]) > 0.999


def test_draws() -> None:
    """Greedy as on the CPU; of others only what top-k and top-p leave, and the same again."""
    torch.manual_seed(0)
    sampler = FlashSampler(importlib.import_module("flashinfer"))
    logits = torch.randn(64, 49_152) * 3
    greedy = sampler(logits.cuda(), [GREEDY] * 64)
    assert [one.token for one in greedy] == [sample(row, GREEDY).token for row in logits]
    settings = [
        type(GREEDY)(temperature=1.0, top_k=5, top_p=0.9, seed=n, draw=3, banned=[])
        for n in range(64)
    ]
    drawn = [one.token for one in sampler(logits.cuda(), settings)]
    best = logits.topk(5).indices
    assert all(token in row.tolist() for token, row in zip(drawn, best, strict=True))
    half = sampler(logits[32:].cuda(), settings[32:])
    assert [one.token for one in half] == drawn[32:]
