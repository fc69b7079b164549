"""A model in this process, without a worker: what parity and attention tests drive."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import AttentionBackend, Segment, TorchAttention
from pdnode.engine.protocol import Drawn, Sampling, SequenceStep, Step, StepDone
from pdnode.engine.runner import Runner
from pdnode.memory.layout import TORCH_DTYPES, LayerViews, region_views
from pdnode.models.config import load_config
from pdnode.models.decoder import Decoder
from pdnode.models.loader import load_model as load_decoder
from pdnode.models.ranks import Ranks

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, draw=0, banned=[])


def load_model(path: Path, dtype: str = "float32", ranks: Ranks | None = None) -> Decoder:
    return load_decoder(path, load_config(path), TORCH_DTYPES[dtype], ranks=ranks)


@dataclass(slots=True)
class LocalEngine:
    """Runs steps of `model` over `pages` pages that are handed out in random order."""

    model: Decoder
    pages: int = 512
    page_tokens: int = 16
    dtype: str = "float32"
    seed: int = 0
    attend: Callable[[list[LayerViews], KvGeometry], AttentionBackend] | None = None  # None: torch
    raised: int = 0
    geometry: KvGeometry = field(init=False)
    memory: torch.Tensor = field(init=False)
    views: list[LayerViews] = field(init=False)
    attention: AttentionBackend = field(init=False)
    runner: Runner = field(init=False)
    free: list[int] = field(init=False)
    _passes: int = 0
    _sequences: int = 0

    def __post_init__(self) -> None:
        self.geometry = self.model.config.kv_geometry(
            tp=self.model.ranks.tp, page_tokens=self.page_tokens, dtype=self.dtype, pages=self.pages
        )
        self.memory = torch.zeros(
            self.geometry.region_bytes, dtype=torch.uint8, device=self.model.device
        )
        self.views = region_views(self.memory, self.geometry)
        self.attention = (
            TorchAttention(self.views, self.geometry, TORCH_DTYPES[self.dtype])
            if self.attend is None
            else self.attend(self.views, self.geometry)
        )
        self.runner = Runner(self.model, self.attention, self.geometry, self._raise)
        self.free = list(range(self.pages))
        random.Random(self.seed).shuffle(self.free)

    def take(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(self.geometry.pages_for(tokens))]

    def new_sequence(self) -> int:
        self._sequences += 1
        return self._sequences

    def step(self, parts: Sequence[SequenceStep], forget: Sequence[int] = ()) -> list[Drawn]:
        return self.run(parts, forget).drawn

    def run(self, parts: Sequence[SequenceStep], forget: Sequence[int] = ()) -> StepDone:
        self._passes += 1
        step = Step(self._passes, self.runner.launched, list(parts), list(forget))
        with torch.inference_mode():
            return self.runner.run(step)

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, chunk: int | None = None
    ) -> list[list[int]]:
        """`count` greedy tokens for each prompt, all in one ragged batch.

        Prompts are fed in chunks of at most `chunk` tokens; one that is done decodes beside the
        chunks of the others.
        """
        size = chunk or max(map(len, prompts))
        ids = [self.new_sequence() for _ in prompts]
        tokens = [list(prompt) for prompt in prompts]
        done = [0] * len(prompts)
        pages = {n: self.take(len(p) + count) for n, p in zip(ids, prompts, strict=True)}
        while any(len(t) < len(p) + count for t, p in zip(tokens, prompts, strict=True)):
            parts = []
            for place, (number, known) in enumerate(zip(ids, tokens, strict=True)):
                if len(known) == len(prompts[place]) + count:
                    continue
                end = min(len(known), done[place] + size)
                sampling = GREEDY if end == len(known) else None
                fed = known[done[place] : end]
                parts.append(
                    SequenceStep(number, done[place], fed, pages.pop(number, []), sampling)
                )
                done[place] = end
            for drawn in self.step(parts):
                tokens[ids.index(drawn.sequence)].append(drawn.token)
        return [known[len(prompt) :] for known, prompt in zip(tokens, prompts, strict=True)]

    def logits(self, prompts: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Logits after every token of each prompt, [tokens, vocabulary], all in ragged batches.

        A pass takes the next of `sizes` tokens of each prompt, where so many are left; the last of
        them is repeated.
        """
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        tables = [self.take(len(prompt)) for prompt in prompts]
        start, waiting = 0, list(sizes)
        while start < max(map(len, prompts)):
            size = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            parts = [
                (place, prompt[start : start + size])
                for place, prompt in enumerate(prompts)
                if start < len(prompt)
            ]
            self.attention.plan([Segment(start, len(fed), tables[place]) for place, fed in parts])
            tokens = torch.tensor([token for _, fed in parts for token in fed])
            positions = torch.cat([start + torch.arange(len(fed)) for _, fed in parts])
            with torch.inference_mode():
                device = self.model.device
                hidden = self.model.forward(
                    tokens.to(device), positions.to(device), self.attention, self._raise
                )
                logits = self.model.logits(hidden)
            for (place, _), rows in zip(
                parts, logits.split([len(f) for _, f in parts]), strict=True
            ):
                found[place].append(rows)
            start += size
        return [torch.cat(rows) for rows in found]

    def _raise(self) -> None:
        self.raised += 1
