"""Runs steps: page tables per sequence, the ragged batch of a pass, the forward pass, the draws."""

import time
from collections.abc import Callable

import torch

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import AttentionBackend, Segment
from pdnode.engine.protocol import Drawn, Scored, SequenceStep, Step, StepDone
from pdnode.engine.sampler import sample, score
from pdnode.models.decoder import Decoder


class Runner:
    """One rank's model over its pages. One step at a time; any error in it is a programmer's.

    Every rank computes the logits, which are joined; rank 0 alone draws, and answers for all.

    `launched` is the running total of layers of all passes: what the layer counter shows when none
    is running. It is never read back from the counter.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        geometry: KvGeometry,
        layer_done: Callable[[], None],
    ) -> None:
        """`layer_done` is called once per layer of each pass, when its K and V are final."""
        self._model = model
        self._attention = attention
        self._geometry = geometry
        self._layer_done = layer_done
        self._leads = model.ranks.rank == 0
        self._tables: dict[int, list[int]] = {}
        self.launched = 0

    def run(self, step: Step) -> StepDone:
        """One forward pass. AssertionError if the step contradicts the geometry or `launched`."""
        began = time.perf_counter()
        assert step.base == self.launched, f"base {step.base}, launched {self.launched} layers"
        self.launched += self._geometry.layers
        for sequence in step.forget:
            self._tables.pop(sequence, None)
        segments = [self._segment(part) for part in step.sequences]
        assert segments, "a step without sequences"
        self._attention.plan(segments)
        tokens = [token for part in step.sequences for token in part.tokens]
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in segments])
        read = any(part.sampling or part.scoring for part in step.sequences)
        hidden = self._model.forward(
            torch.tensor(tokens), positions, self._attention, self._layer_done, kv_only=not read
        )
        drawn = self._draw(step, hidden)
        scored = self._score(step, hidden)
        return StepDone(step.pass_id, drawn, time.perf_counter() - began, scored)

    def _segment(self, part: SequenceStep) -> Segment:
        """Take a sequence's new pages into its table, and check what the pass asks of it."""
        table = self._tables.setdefault(part.sequence, [])
        for page in part.new_pages:
            assert 0 <= page < self._geometry.pages, f"page {page} of {self._geometry.pages}"
        table += part.new_pages
        config = self._model.config
        end = part.start + len(part.tokens)
        assert part.tokens, f"sequence {part.sequence} without tokens"
        assert 0 <= part.start < end <= config.context_tokens, (part.start, end)
        assert self._geometry.pages_for(end) <= len(table), f"{end} tokens, {len(table)} pages"
        for token in part.tokens:
            assert 0 <= token < config.vocabulary, f"token {token} of {config.vocabulary}"
        return Segment(part.start, len(part.tokens), table)

    def _draw(self, step: Step, hidden: torch.Tensor) -> list[Drawn]:
        rows: list[int] = []
        row = -1
        for part in step.sequences:
            row += len(part.tokens)
            if part.sampling is not None:
                rows.append(row)
        if not rows:
            return []
        logits = iter(self._model.logits(hidden[rows]))
        drawn: list[Drawn] = []
        if not self._leads:
            return drawn
        for part in step.sequences:
            if part.sampling is not None:
                token, logprob, top = sample(next(logits), part.sampling)
                drawn.append(Drawn(part.sequence, token, logprob, top))
        return drawn

    def _score(self, step: Step, hidden: torch.Tensor) -> list[Scored]:
        scored: list[Scored] = []
        first = 0
        for part in step.sequences:
            scoring = part.scoring
            if scoring is not None:
                assert len(scoring.targets) <= len(part.tokens), "targets without rows"
                rows = hidden[first : first + len(scoring.targets)]
                found = score(rows, scoring.targets, scoring.top, self._model.logits)
                if self._leads:
                    scored.append(Scored(part.sequence, *found))
            first += len(part.tokens)
        return scored
