"""From tokens to text: detokenizing, stop strings, and where the answer ends. No I/O."""

from typing import NamedTuple

from pdnode.api.codec import TextDecoder
from pdnode.core.request import TokenEvent


class Piece(NamedTuple):
    """What one token adds to the answer. `text` is empty while text is held back."""

    text: str
    finish: str | None  # "stop" or "length" on the last piece
    token: int


class StopScanner:
    """Finds stop strings in text that comes in parts, and lets no beginning of one out.

    The stop string that is complete first ends the text, however the text was cut into parts; of
    several that are complete at the same character, the one that began first.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    def push(self, text: str, *, armed: bool) -> tuple[str, bool]:
        """(text that may go out, whether a stop string was found). Not armed: it only holds back.

        Only a match that ends in `text` counts: one that was complete before was passed over on
        purpose, while not armed.
        """
        before = len(self._held)
        buffer = self._held + text
        self._held = ""
        if armed and (start := self._match(buffer, before)) is not None:
            return buffer[:start], True
        keep = self._beginning(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _match(self, buffer: str, before: int) -> int | None:
        """Start of the match that ends first, among those that end behind `before`."""
        found: list[tuple[int, int]] = []
        for stop in self._stops:
            start = buffer.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found)[1] if found else None

    def _beginning(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that a stop string begins with."""
        for length in range(min(len(buffer), self._longest - 1), 0, -1):
            if any(stop.startswith(buffer[-length:]) for stop in self._stops):
                return length
        return 0


class Assembler:
    """The text of one answer, token by token."""

    def __init__(self, decoder: TextDecoder, stops: tuple[str, ...], min_tokens: int) -> None:
        self._decoder = decoder
        self._scanner = StopScanner(stops)
        self._min_tokens = min_tokens
        self.tokens = 0  # generated so far, the stop token included
        self.finish: str | None = None  # why the answer is complete, once it is

    def push(self, event: TokenEvent) -> Piece:
        """The piece for one event; its `finish` is set by the event or by a stop string."""
        assert self.finish is None
        self.tokens += 1
        # The text of a stop token, which may be an ordinary one (stop_token_ids), is not shown.
        text = "" if event.finish == "stop" else self._decoder.push(event.token)
        if event.finish is not None:
            text += self._decoder.flush()
        shown, stopped = self._scanner.push(text, armed=self.tokens >= self._min_tokens)
        self.finish = "stop" if stopped else event.finish
        if self.finish is not None and not stopped:
            shown += self._scanner.flush()
        return Piece(shown, self.finish, event.token)
