"""Prefill and decode of any width give the tokens of one rank: real nodes, a process per rank."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.shardings.parity import MOST, OUTPUT_TOKENS, TABLE, reference, worst
from tests.support.model import smollm2_dir
from tests.support.nodes import NodeSpec, cluster
from tests.support.tiny_families import write_family
from tests.support.tiny_model import VOCABULARY, write_tiny_llama

LENGTHS = (2, 17, 65, 150)
CHUNK_TOKENS = 64

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True)
class Row:
    """Ranks of a group on both sides; `dp`: groups of the decode node."""

    model: str
    prefill: int
    decode: int
    dp: int = 1

    def __str__(self) -> str:
        groups = f"x{self.dp}" if self.dp > 1 else ""
        return f"{self.model}-{self.prefill}-{self.decode}{groups}"


ROWS = (
    Row("gqa4", 2, 1),
    Row("gqa4", 1, 4),
    Row("gqa4", 4, 2),
    Row("gqa2", 4, 4),
    Row("smollm2", 3, 1),
    Row("gqa4", 2, 1, dp=2),
    Row("deepseek_v3", 2, 2),
    Row("deepseek_v3", 1, 1, dp=2),
    Row("qwen3_moe", 2, 1),
)


def checkpoint(folder: Path, model: str) -> Path:
    match model:
        case "gqa4":
            return write_tiny_llama(folder / model, heads=8, kv_heads=4)
        case "gqa2":
            return write_tiny_llama(folder / model, heads=4, kv_heads=2)
        case "smollm2":
            return smollm2_dir()
    return write_family(folder / model, model)


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_tokens_and_logits_are_those_of_one_rank(tmp_path: Path, row: Row) -> None:
    path = checkpoint(tmp_path, row.model)
    chance = random.Random(5)
    prompts = [[chance.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    steps = reference(path, prompts)
    engine = {"chunk_tokens": CHUNK_TOKENS, "tp": row.prefill}
    prefill = NodeSpec("pf", "prefill", path, tmp_path, engine=engine)
    engine = {"chunk_tokens": CHUNK_TOKENS, "tp": row.decode, "dp": row.dp}
    decode = NodeSpec("dc", "decode", path, tmp_path, (prefill,), engine=engine)
    async with cluster(prefill, decode) as (_, (sender, target)):
        found = await asyncio.gather(
            *(worst(target, prompt, one) for prompt, one in zip(prompts, steps, strict=True))
        )
        await sender.wait_no_pages()
        await target.wait_no_pages()
    TABLE.append(
        f"{row!s:<16} {len(prompts)} prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens, "
        f"{len(prompts) * OUTPUT_TOKENS} tokens equal, logits differ by {max(found):.1e} "
        "standard deviations"
    )
    assert max(found) <= MOST
