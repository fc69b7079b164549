"""The schedule: which tokens of which sequences the next forward pass runs.

Continuous batching with chunked prefill. The step loop of the daemon, once per pass:

    planned = scheduler.plan()              # None: nothing to do, wait for `add`
    … for every chunk of a prefill_only sequence: submit its layer programs (core/plan.py):
        pages = chunk_pages(chunk.start, chunk.end, len(tokens), page_tokens, first_page)
        programs(routes, source pages at these indexes, destination pages, chunk.number)
      with the layer counter's total *before* this pass as base. Before `first_page` none are due.
    … send Step: tokens[chunk.start:chunk.end], Sampling where chunk.samples, and await StepDone
    … `add` and `remove` may come at any time in between
    scheduler.commit(planned.pass_id, drawn)   # one token per chunk with `samples`
    … hand the tokens out, `remove` what has ended by a stop token or by length, plan again

A sequence that is *waiting* still has prompt to prefill; one that is *running* decodes. Memory is
the caller's: it reserves all pages before `add`, so that nothing here ever preempts.
"""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pdnode.types import Run, SequenceId, count_pages


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One sequence in the schedule. The caller keeps it; between `add` and `remove` only the
    scheduler changes it, in `plan` and `commit`."""

    sequence: SequenceId
    tokens: list[int]
    """The prompt, then what `commit` appended. prefill_only: the prompt without its last token."""
    prompt_tokens: int  # how many of `tokens` were there before any was drawn
    pages: tuple[Run, ...]  # hold all tokens that will be run, prompt and generated
    computed: int = 0
    """Tokens whose KV is in the pages: a page edge, or all but the last (KV of a peer)."""
    prefill_only: bool = False  # nothing is sampled; the schedule drops it after its last chunk
    peer: str = ""  # who asked: prefill is fair over peers; "" is this node
    priority: int = 0  # higher first, among the sequences of one peer
    chunks: int = 0  # chunks planned so far
    page_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.page_count = count_pages(self.pages)

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Only the newest token is left to run, and it draws the next one."""
        return not self.prefill_only and self.remaining == 1


class Chunk(NamedTuple):
    """Tokens [start, end) of one sequence in a pass.

    `end` is a page edge, or all known tokens (`last`). A decode step is a chunk of one token.
    """

    sequence: SequenceId
    start: int
    end: int
    samples: bool  # the pass draws the token that follows `end`
    last: bool  # no known token is left after it; for prefill_only: the sequence is done
    number: int  # chunks of this sequence before it, decode steps included


class Pass(NamedTuple):
    """One forward pass: decode steps first, then prefill chunks; each sequence at most once."""

    pass_id: int  # 1, 2, … in the order in which passes run
    chunks: tuple[Chunk, ...]


class Scheduler:
    """Decides on passes; knows nothing of pages' contents, peers' links or workers.

    page_tokens: tokens a page. chunk_tokens: token budget of a pass, decode steps included; where
    they leave less than a page, prefill gets a page all the same, so that it never stands still.
    max_running: decode steps in a pass; where more sequences decode, they take turns.

    One pass is in flight at a time. Owned by the event loop. If the worker dies, the KV is gone:
    drop the scheduler and build a new one.
    """

    def __init__(self, *, page_tokens: int, chunk_tokens: int, max_running: int) -> None:
        assert min(page_tokens, chunk_tokens, max_running) > 0
        self._page_tokens = page_tokens
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._sequences: dict[SequenceId, Sequence] = {}
        self._decoding: dict[SequenceId, Sequence] = {}  # next turn first
        # Prefill: a queue per peer with work. Between peers that stand level, the first one goes.
        self._queues: dict[str, list[Sequence]] = {}
        self._served: dict[str, int] = {}  # prefill tokens, comparable between peers
        self._passes = 0
        self._flight: Pass | None = None

    @property
    def page_tokens(self) -> int:
        return self._page_tokens

    @property
    def max_pass_tokens(self) -> int:
        """Most tokens that a pass can have: what the worker must take (`Init.max_batch_tokens`)."""
        return max(self._chunk_tokens, self._max_running + self._page_tokens)

    def limit_running(self, max_running: int) -> None:
        """From the next pass on."""
        assert max_running > 0
        self._max_running = max_running

    @property
    def waiting(self) -> int:
        """Sequences with prompt left to prefill, those in the middle of it included."""
        return len(self._sequences) - len(self._decoding)

    @property
    def running(self) -> int:
        """Sequences that decode."""
        return len(self._decoding)

    def waiting_tokens(self, peer: str | None = None) -> int:
        """Tokens left to prefill, of one peer or of all; those of the pass in flight included."""
        queues = self._queues.values() if peer is None else [self._queues.get(peer, [])]
        return sum(sequence.remaining for queue in queues for sequence in queue)

    def position(self, sequence_id: SequenceId) -> int:
        """Sequences whose next chunk comes before this one's, if none arrives; 0 if it decodes.

        Of peers that stand level only one is next: a place may be as many further back.
        """
        assert sequence_id in self._sequences
        if sequence_id in self._decoding:
            return 0
        flying = (
            {}
            if self._flight is None
            else {chunk.sequence: chunk.end - chunk.start for chunk in self._flight.chunks}
        )
        # The tokens that its peer has been served when a sequence comes up order all of them.
        due = {}
        for peer, queue in self._queues.items():
            served = self._served[peer]
            for sequence in queue:
                due[sequence.sequence] = served
                served += sequence.remaining - flying.get(sequence.sequence, 0)
        return sum(other < due[sequence_id] for other in due.values())

    def in_flight(self, sequence_id: SequenceId) -> bool:
        """Whether the pass in flight runs it, also after `remove`: the worker then still writes
        its pages, which must not be released before `commit`."""
        return self._flight is not None and any(
            chunk.sequence == sequence_id for chunk in self._flight.chunks
        )

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence into the next plan; never refuses (bound the queue before)."""
        assert sequence.sequence not in self._sequences
        assert not self.in_flight(sequence.sequence), "a sequence id is never used twice"
        assert 0 < sequence.prompt_tokens <= len(sequence.tokens)
        assert 0 <= sequence.computed < len(sequence.tokens)
        assert sequence.computed % self._page_tokens == 0 or sequence.decodes
        assert len(sequence.tokens) <= sequence.page_count * self._page_tokens
        self._sequences[sequence.sequence] = sequence
        if sequence.decodes:
            self._decoding[sequence.sequence] = sequence
        else:
            self._enqueue(sequence)

    def remove(self, sequence_id: SequenceId) -> bool:
        """Ends a sequence at any time; False if it is not here (any more).

        If `in_flight`, the rest of its pass runs and the result is dropped; `commit` names it.
        """
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        if self._decoding.pop(sequence_id, None) is None:
            self._dequeue(sequence)
        return True

    def plan(self) -> Pass | None:
        """The next pass, or None if there is nothing to run. The one before is committed."""
        assert self._flight is None, "a pass is in flight"
        chunks = self._decode_steps()
        budget = max(self._chunk_tokens - len(chunks), self._page_tokens)
        chunks += self._prefill_chunks(budget)
        if not chunks:
            return None
        self._passes += 1
        self._flight = Pass(self._passes, tuple(chunks))
        return self._flight

    def commit(self, pass_id: int, drawn: Mapping[SequenceId, int]) -> tuple[SequenceId, ...]:
        """The pass is done: advances its sequences and appends the tokens that it drew.

        `drawn` has every sequence with `samples` that was not removed, and no one else. Returns the
        sequences removed while the pass ran: no pass touches their pages any more.
        """
        flight = self._flight
        assert flight is not None, "no pass is in flight"
        assert flight.pass_id == pass_id, f"pass {pass_id} ends, {flight.pass_id} is in flight"
        assert drawn.keys() <= {chunk.sequence for chunk in flight.chunks if chunk.samples}
        self._flight = None
        removed = []
        for chunk in flight.chunks:
            sequence = self._sequences.get(chunk.sequence)
            if sequence is None:
                removed.append(chunk.sequence)
                continue
            assert sequence.computed == chunk.start
            sequence.computed = chunk.end
            if chunk.samples:
                sequence.tokens.append(drawn[chunk.sequence])
            if chunk.sequence not in self._decoding:
                self._after_prefill(sequence)
        return tuple(removed)

    def _after_prefill(self, sequence: Sequence) -> None:
        """Moves a sequence whose prompt is done out of its queue."""
        if sequence.decodes:
            self._dequeue(sequence)
            self._decoding[sequence.sequence] = sequence
        elif sequence.remaining == 0:
            self._dequeue(sequence)
            del self._sequences[sequence.sequence]

    def _decode_steps(self) -> list[Chunk]:
        turn = list(self._decoding.values())[: self._max_running]
        if len(turn) < len(self._decoding):
            for sequence in turn:
                self._decoding[sequence.sequence] = self._decoding.pop(sequence.sequence)
        return [self._chunk(sequence, len(sequence.tokens)) for sequence in turn]

    def _prefill_chunks(self, budget: int) -> list[Chunk]:
        """Chunks within `budget` tokens, always of the peer that was served least.

        Ends at the first chunk that does not fit or does not complete its sequence: less than a
        page of budget is left then, and giving it to a peer out of turn would break the fairness
        bound (served tokens of peers that always have work differ by at most one chunk).
        """
        chunks: list[Chunk] = []
        taken = dict.fromkeys(self._queues, 0)
        while True:
            peers = [peer for peer, queue in self._queues.items() if taken[peer] < len(queue)]
            if not peers:
                return chunks
            peer = min(peers, key=self._served.__getitem__)
            sequence = self._queues[peer][taken[peer]]
            end = min(sequence.computed + budget, len(sequence.tokens))
            if end < len(sequence.tokens):
                end -= end % self._page_tokens
            size = end - sequence.computed
            if size <= 0:
                return chunks
            chunks.append(self._chunk(sequence, end))
            self._served[peer] += size
            if not chunks[-1].last:
                return chunks
            taken[peer] += 1
            budget -= size

    def _chunk(self, sequence: Sequence, end: int) -> Chunk:
        assert end <= sequence.page_count * self._page_tokens, "no page for the token"
        last = end == len(sequence.tokens)
        samples = last and not sequence.prefill_only
        number = sequence.chunks
        sequence.chunks += 1
        # Once for every token of every stream, and names would take twice as long.
        return Chunk(sequence.sequence, sequence.computed, end, samples, last, number)

    def _enqueue(self, sequence: Sequence) -> None:
        peer = sequence.peer
        if peer not in self._queues:
            # A peer that was idle gets no credit for it, but what it had more than others stays.
            floor = min((self._served[other] for other in self._queues), default=0)
            self._served[peer] = max(self._served.get(peer, 0), floor)
            self._queues[peer] = []
        insort(self._queues[peer], sequence, key=lambda queued: -queued.priority)

    def _dequeue(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.peer]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.peer]
            floor = min((self._served[other] for other in self._queues), default=None)
            self._served = {
                peer: served
                for peer, served in self._served.items()
                if floor is not None and (peer in self._queues or served > floor)
            }
