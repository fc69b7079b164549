"""What a request's bias and penalties do to its logits, kept up to date draw by draw.

The daemon keeps it, not the worker: a decode node's worker never sees the prompt of a request that
another node prefilled, and a repetition penalty counts the prompt.
"""

from array import array

from pdnode.core.request import Request
from pdnode.engine.protocol import LogitChanges


def changes_logits(request: Request) -> bool:
    return bool(
        request.logit_bias
        or request.presence_penalty
        or request.frequency_penalty
        or request.repetition_penalty != 1
    )


class Changes:
    """The changes for the next draw of one request.

    Presence and frequency penalties count generated tokens (OpenAI's definition: the logit of a
    token falls by presence, once, and by frequency for each time it came); the repetition penalty
    takes every token of prompt and answer once. `packed` copies a few bytes per token of these.
    """

    def __init__(self, request: Request) -> None:
        self._presence = request.presence_penalty
        self._frequency = request.frequency_penalty
        self._repetition = request.repetition_penalty
        self._repeats = request.repetition_penalty != 1
        self._seen = set(request.prompt) if self._repeats else set()
        self._repeated = array("I", sorted(self._seen))
        self._places = {token: place for place, (token, _) in enumerate(request.logit_bias)}
        self._ids = array("I", self._places)
        self._bias = array("f", (bias for _, bias in request.logit_bias))
        self._penalized: set[int] = set()

    def drew(self, token: int) -> None:
        """`token` is part of the answer now."""
        if self._repeats and token not in self._seen:
            self._seen.add(token)
            self._repeated.append(token)
        if not self._presence and not self._frequency:
            return
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._ids)
            self._ids.append(token)
            self._bias.append(0.0)
        if token not in self._penalized:
            self._penalized.add(token)
            self._bias[place] -= self._presence
        self._bias[place] -= self._frequency

    def packed(self) -> LogitChanges:
        return LogitChanges(
            self._repeated.tobytes(), self._repetition, self._ids.tobytes(), self._bias.tobytes()
        )
