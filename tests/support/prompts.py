"""Prompts for the random models of the tests."""

import random

from tests.support.tiny_model import VOCABULARY


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Ids of the tiny tokenizer, the same for the same seed."""
    draw = random.Random(f"{seed} {tokens}")
    return [draw.randrange(3, VOCABULARY) for _ in range(tokens)]
