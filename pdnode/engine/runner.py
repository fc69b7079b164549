"""Runs steps: page tables per sequence, the ragged batch of a pass, the forward pass, the draws."""

import time
from array import array
from collections.abc import Callable, Sequence

import torch

from pdnode.core.geometry import KvGeometry
from pdnode.engine.attention import AttentionBackend, Segment
from pdnode.engine.graphs import DecodeGraphs
from pdnode.engine.protocol import Drawn, Scored, SequenceStep, Step, StepDone
from pdnode.engine.sampler import Sampler, sample_each, score
from pdnode.models.decoder import Decoder


def nothing() -> None:
    """What is done where there is nothing to do."""


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
        *,
        sampler: Sampler = sample_each,
        graphs: DecodeGraphs | None = None,
        finish: Callable[[], None] = nothing,
    ) -> None:
        """`layer_done` is called once per layer of each pass, when its K and V are final; a pass
        of `graphs` has that recorded. `finish` waits until the device has done all of a pass.
        """
        self._model = model
        self._attention = attention
        self._geometry = geometry
        self._layer_done = layer_done
        self._sampler = sampler
        self._graphs = graphs
        self._finish = finish
        self._leads = model.ranks.rank == 0
        self._tables: dict[int, array[int]] = {}
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
        tokens = [token for part in step.sequences for token in part.tokens]
        read = any(part.sampling or part.scoring for part in step.sequences)
        hidden = self._forward(tokens, segments, kv_only=not read)
        drawn = self._draw(step, hidden)
        scored = self._score(step, hidden)
        self._finish()
        return StepDone(step.pass_id, drawn, time.perf_counter() - began, scored)

    def _forward(
        self, tokens: Sequence[int], segments: Sequence[Segment], *, kv_only: bool
    ) -> torch.Tensor:
        if self._graphs is not None and not kv_only and self._graphs.fits(segments):
            return self._graphs.run(tokens, segments)
        self._attention.plan(segments)
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in segments])
        device = self._model.device
        return self._model.forward(
            torch.tensor(tokens).to(device),
            positions.to(device),
            self._attention,
            self._layer_done,
            kv_only=kv_only,
        )

    def _segment(self, part: SequenceStep) -> Segment:
        """Take a sequence's new pages into its table, and check what the pass asks of it."""
        table = self._tables.setdefault(part.sequence, array("i"))
        for page in part.new_pages:
            assert 0 <= page < self._geometry.pages, f"page {page} of {self._geometry.pages}"
        table.extend(part.new_pages)
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
        wanted: list[SequenceStep] = []
        row = -1
        for part in step.sequences:
            row += len(part.tokens)
            if part.sampling is not None:
                rows.append(row)
                wanted.append(part)
        if not rows:
            return []
        logits = self._model.logits(hidden[torch.tensor(rows, device=hidden.device)])
        if not self._leads:
            return []
        samplings = [part.sampling for part in wanted if part.sampling is not None]
        drawn = self._sampler(logits, samplings)
        return [
            Drawn(part.sequence, token, logprob, top)
            for part, (token, logprob, top) in zip(wanted, drawn, strict=True)
        ]

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
