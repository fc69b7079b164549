"""The checked-in greedy tokens of transformers (scripts/make_reference.py makes them)."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).resolve().parents[1] / "data" / "reference" / "smollm2.json"


class Case(NamedTuple):
    """A prompt and the tokens that must follow it greedily in float32, end-of-text ignored."""

    prompt: list[int]
    tokens: list[int]


class Reference(NamedTuple):
    """`grid`: one case per interesting prompt length, 32 tokens. `prompts`: 64 cases of 64."""

    model_sha256: str
    grid: dict[int, Case]
    prompts: list[Case]


@cache
def load_reference() -> Reference:
    raw = json.loads(_FILE.read_text(encoding="utf-8"))
    grid = [Case(row["prompt"], row["tokens"]) for row in raw["grid"]]
    return Reference(
        model_sha256=raw["model_sha256"],
        grid={len(case.prompt): case for case in grid},
        prompts=[Case(row["prompt"], row["tokens"]) for row in raw["set"]],
    )
