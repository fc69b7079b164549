"""The torch back end against plain attention written out, on random ragged passes."""

import math
import random

import pytest
import torch

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import Segment, TorchAttention
from pdnode.memory.layout import region_views

HEADS, KV_HEADS, DIM, PAGE_TOKENS, PAGES = 6, 2, 8, 4, 64


def geometry(dtype: str = "float32") -> KvGeometry:
    return KvGeometry("gqa", 2, KV_HEADS, DIM, PAGE_TOKENS, dtype, 1, PAGES)


def naive(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The last len(queries) of len(keys) positions attend; [n, H, D], [s, Hr, D] twice."""
    shift = len(keys) - len(queries)
    out = torch.empty_like(queries)
    for row in range(len(queries)):
        for head in range(HEADS):
            seen = slice(0, shift + row + 1)
            shared = head // (HEADS // KV_HEADS)
            scores = keys[seen, shared] @ queries[row, head] / math.sqrt(DIM)
            out[row, head] = scores.softmax(0) @ values[seen, shared]
    return out


@pytest.mark.parametrize("seed", range(6))
def test_ragged_passes_equal_plain_attention(seed: int) -> None:
    """Several sequences grow by random numbers of tokens, in memory that holds NaN at first."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    memory = torch.full((geometry().region_bytes // 4,), math.nan).view(torch.uint8)
    attention = TorchAttention(region_views(memory, geometry()), geometry(), torch.float32)
    free = list(range(PAGES))
    choice.shuffle(free)
    tables: list[list[int]] = [[] for _ in range(4)]
    known = [(torch.empty(0, KV_HEADS, DIM), torch.empty(0, KV_HEADS, DIM)) for _ in range(4)]
    for _ in range(6):
        batch = choice.sample(range(4), choice.randint(1, 4))
        counts = [choice.choice((1, 1, 2, 4, 7)) for _ in batch]
        for place, count in zip(batch, counts, strict=True):
            while len(tables[place]) * PAGE_TOKENS < len(known[place][0]) + count:
                tables[place].append(free.pop())
        attention.plan(
            [
                Segment(len(known[place][0]), count, tables[place])
                for place, count in zip(batch, counts, strict=True)
            ]
        )
        queries = torch.randn(sum(counts), HEADS, DIM)
        keys, values = torch.randn(2, sum(counts), KV_HEADS, DIM)
        found = attention.run(1, queries, keys, values)
        row = 0
        for place, count in zip(batch, counts, strict=True):
            rows = slice(row, row + count)
            row += count
            known[place] = (
                torch.cat((known[place][0], keys[rows])),
                torch.cat((known[place][1], values[rows])),
            )
            torch.testing.assert_close(found[rows], naive(queries[rows], *known[place]))


def test_tokens_lie_where_the_geometry_says() -> None:
    """Token 5 of a sequence with pages (9, 2): page 2, place 1; the other layer stays untouched."""
    form = geometry()
    memory = torch.zeros(form.region_bytes, dtype=torch.uint8)
    attention = TorchAttention(region_views(memory, form), form, torch.float32)
    attention.plan([Segment(0, 6, [9, 2])])
    keys = torch.randn(6, KV_HEADS, DIM)
    values = torch.randn(6, KV_HEADS, DIM)
    attention.run(1, torch.randn(6, HEADS, DIM), keys, values)
    whole = memory.view(torch.float32).view(2, PAGES, KV_HEADS, 2, PAGE_TOKENS, DIM)
    assert torch.equal(whole[1, 2, 1, 0, 1], keys[5, 1])
    assert torch.equal(whole[1, 9, 0, 1, 3], values[3, 0])
    assert not whole[0].any()
    assert whole[1].count_nonzero() == 2 * 6 * KV_HEADS * DIM
    offset = form.layer_stride + 2 * form.page_bytes + form.head_bytes
    stored = memory[offset : offset + form.head_bytes].view(torch.float32)
    assert torch.equal(stored[DIM : 2 * DIM], keys[5, 1])


def test_pages_of_another_dtype() -> None:
    form = geometry("bfloat16")
    memory = torch.zeros(form.region_bytes, dtype=torch.uint8)
    attention = TorchAttention(region_views(memory, form), form, torch.float32)
    queries, (keys, values) = torch.randn(5, HEADS, DIM), torch.randn(2, 5, KV_HEADS, DIM)
    attention.plan([Segment(0, 5, [3, 4])])
    found = attention.run(0, queries, keys, values)
    wanted = naive(queries, keys.bfloat16().float(), values.bfloat16().float())
    torch.testing.assert_close(found, wanted)


def test_a_table_too_short_is_a_programmers_error() -> None:
    form = geometry()
    memory = torch.zeros(form.region_bytes, dtype=torch.uint8)
    attention = TorchAttention(region_views(memory, form), form, torch.float32)
    with pytest.raises(AssertionError, match="5 tokens in 1 pages"):
        attention.plan([Segment(0, 5, [3])])
