"""Greedy float32 tokens of `transformers`, the oracle of the parity tests.

Run by hand in an environment of its own (`pip install torch transformers`), never by the tests:

    python scripts/make_reference.py --model build/models/smollm2-135m-instruct

Prompts are slices of tests/data/reference/text.txt. One is kept only if the two best logits of
every compared token are at least MIN_GAP apart: the order of float32 sums then cannot flip a token,
and any difference is a fault. End-of-text does not end an answer.
"""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

MIN_GAP = 0.01
GRID_TOKENS = 32
SET_TOKENS = 64
SET_PROMPTS = 64
SEED = 20261129
# 1 and 2; around a page of 16; around chunks of 64 and of 512 and a bit over three of each; text.
GRID_SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 197, 511, 512, 513, 1500, 1541)
SET_SIZES = (8, 240)

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "tests" / "data" / "reference"


def answer(model: torch.nn.Module, prompt: list[int], count: int) -> tuple[list[int], float] | None:
    """`count` greedy tokens and the least gap among them; None once a gap is too small."""
    tokens: list[int] = []
    least = float("inf")
    cache = None
    fed = torch.tensor([prompt])
    while len(tokens) < count:
        out = model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        (best, second), (token, _) = (part.tolist() for part in out.logits[0, -1].topk(2))
        least = min(least, best - second)
        if least < MIN_GAP:
            return None
        tokens.append(token)
        fed = torch.tensor([[token]])
    return tokens, least


def slices(text: list[int], size: int, generator: random.Random) -> Iterator[list[int]]:
    starts = list(range(len(text) - size + 1))
    generator.shuffle(starts)
    for start in starts:
        yield text[start : start + size]


def entry(model: torch.nn.Module, prompt: list[int], count: int) -> dict[str, object] | None:
    found = answer(model, prompt, count)
    if found is None:
        return None
    tokens, gap = found
    return {"prompt": prompt, "tokens": tokens, "least_gap": round(gap, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=REFERENCE / "smollm2.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    lines = (REFERENCE / "text.txt").read_text(encoding="utf-8").splitlines()
    text = tokenizer.encode("\n".join(line for line in lines if not line.startswith("#")))
    generator = random.Random(SEED)

    grid = []
    for size in GRID_SIZES:
        candidates = (entry(model, p, GRID_TOKENS) for p in slices(text, size, generator))
        grid.append(next(found for found in candidates if found is not None))
        sys.stderr.write(f"grid {size}: gap {grid[-1]['least_gap']}\n")
    prompts: list[dict[str, object]] = []
    while len(prompts) < SET_PROMPTS:
        prompt = next(slices(text, generator.randint(*SET_SIZES), generator))
        if (found := entry(model, prompt, SET_TOKENS)) is not None:
            prompts.append(found)
            sys.stderr.write(f"set {len(prompts)}: {len(prompt)} tokens\n")
    weights = (arguments.model / "model.safetensors").read_bytes()
    result = {
        "script": "scripts/make_reference.py",
        "model": arguments.model.name,
        "model_sha256": hashlib.sha256(weights).hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "min_gap": MIN_GAP,
        "grid": grid,
        "set": prompts,
    }
    arguments.output.write_text(_compact(result), encoding="utf-8")


def _compact(result: dict[str, object]) -> str:
    """JSON with one prompt a line, so that a change shows as a readable difference."""
    parts = []
    for key, value in result.items():
        if isinstance(value, list):
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
            parts.append(f'  "{key}": [\n{rows}\n  ]')
        else:
            parts.append(f'  "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
