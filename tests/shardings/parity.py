"""The TP 1 reference of a checkpoint, and what real nodes say beside it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pdnode.engine.protocol import Sampling, SequenceStep
from tests.support.local_engine import LocalEngine, load_model
from tests.support.nodes import Client

TOP = 20  # likeliest tokens that the API names
MOST = 1e-4  # of the standard deviation of the reference's logits
OUTPUT_TOKENS = 8

TABLE: list[str] = []


@dataclass(frozen=True, slots=True)
class Step:
    """One greedy token: log probabilities of the likeliest, and how wide the logits are spread."""

    token: int
    likeliest: list[float]  # TOP of them, likeliest first
    deviation: float


def reference(path: Path, prompts: list[list[int]]) -> list[list[Step]]:
    """Greedy, in this process, on one rank, each prompt in one chunk."""
    engine = LocalEngine(load_model(path))
    vocabulary = engine.model.config.vocabulary
    return [_follow(engine, prompt, vocabulary) for prompt in prompts]


def _follow(engine: LocalEngine, prompt: list[int], vocabulary: int) -> list[Step]:
    number, known, found = engine.new_sequence(), list(prompt), []
    pages = engine.take(len(prompt) + OUTPUT_TOKENS)
    draw = Sampling(0.0, 0, 1.0, 0, 0, [], logprobs=vocabulary)
    start = 0
    while len(found) < OUTPUT_TOKENS:
        (drawn,) = engine.step([SequenceStep(number, start, known[start:], pages, draw)])
        start, pages = len(known), []
        known.append(drawn.token)
        logprobs = torch.tensor([logprob for _, logprob in drawn.top], dtype=torch.float64)
        assert len(logprobs) == vocabulary
        # Logits and log probabilities differ by one number, so they are spread alike.
        found.append(Step(drawn.token, logprobs[:TOP].tolist(), float(logprobs.std())))
    return found


async def worst(client: Client, prompt: list[int], steps: list[Step]) -> float:
    """The node's tokens are the reference's; the largest difference of a log probability, in
    standard deviations of the reference's logits."""
    body = await client.complete(prompt, OUTPUT_TOKENS, return_token_ids=True, logprobs=TOP)
    (choice,) = body["choices"]  # type: ignore[misc]
    assert choice["token_ids"] == [step.token for step in steps], len(prompt)
    most = 0.0
    for step, named in zip(steps, choice["logprobs"]["top_logprobs"], strict=True):
        likeliest = sorted(named.values(), reverse=True)[:TOP]
        assert len(likeliest) == TOP
        pairs = zip(likeliest, step.likeliest, strict=True)
        most = max(most, max(abs(a - b) for a, b in pairs) / step.deviation)
    return most
