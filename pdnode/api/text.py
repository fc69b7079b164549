"""From tokens to text: detokenizing, stop strings, echo, and where the answer ends. No I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdnode.api.codec import TextCodec
from pdnode.core.request import Score, TokenEvent


class Entry(NamedTuple):
    """What is known of one token of the shown text, the echoed prompt included."""

    token: int
    offset: int
    """Characters of the text before it. Beyond the end for tokens that a stop string cut off."""
    logprob: float | None  # None: the first token of a prompt, which follows nothing
    top: Sequence[tuple[int, float]]  # (token, log probability), likeliest first


class Piece(NamedTuple):
    """What one token adds to a choice. `text` is empty while text is held back.

    With echo the first piece has the prompt before it, and may have no token at all.
    """

    text: str
    finish: str | None  # "stop" or "length" on the last piece
    tokens: tuple[int, ...]  # generated
    entries: tuple[Entry, ...] = ()
    choice: int = 0


def joined(pieces: Iterable[Piece]) -> Piece:
    """All pieces of one choice as one."""
    parts = list(pieces)
    return Piece(
        "".join(part.text for part in parts),
        parts[-1].finish,
        tuple(token for part in parts for token in part.tokens),
        tuple(entry for part in parts for entry in part.entries),
        parts[-1].choice,
    )


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt to be shown before the answer."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]  # of each token in `text`
    alone: bool  # max_tokens 0: nothing follows; the one token that was generated is not shown

    @classmethod
    def of(
        cls, tokens: tuple[int, ...], codec: TextCodec, *, text: str | None, alone: bool
    ) -> "Echo":
        """`text`: as the client sent it; None where it sent `tokens`."""
        shown = codec.decode(tokens) if text is None else text
        offsets: list[int] = []
        at = 0
        decoder = codec.decoder()
        for token in tokens:
            piece = decoder.push(token)
            offsets.append(_start(token, piece, codec, before=at))
            at += len(piece)
            # A control token has no text, unless the client wrote it out.
            name = codec.control_name(token)
            at += len(name) if name and shown.startswith(name, at) else 0
        return cls(shown, tokens, tuple(offsets), alone)

    def entries(self, scores: Sequence[Score]) -> tuple[Entry, ...]:
        """`scores`: of all tokens but the first, or none at all."""
        if not scores:
            return ()
        known = [(None, ()), *scores]
        return tuple(
            Entry(token, offset, logprob, top)
            for token, offset, (logprob, top) in zip(self.tokens, self.offsets, known, strict=True)
        )


def _start(token: int, text: str, codec: TextCodec, *, before: int) -> int:
    """Where a token begins in the text. `text`: what it added to the `before` characters there.

    That may begin with U+FFFD for a character that the tokens before it left unfinished.
    """
    try:
        own = codec.token_bytes(token).decode()
    except UnicodeDecodeError:
        return before  # a part of a character, which begins or began there
    return before + len(text) - len(own)


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
    """The text of one choice, token by token."""

    def __init__(
        self,
        codec: TextCodec,
        stops: tuple[str, ...],
        min_tokens: int,
        *,
        echo: Echo | None = None,
        choice: int = 0,
    ) -> None:
        self._codec = codec
        self._decoder = codec.decoder()
        self._scanner = StopScanner(stops)
        self._min_tokens = min_tokens
        self._echo = echo
        self._choice = choice
        self._offset = 0 if echo is None else len(echo.text)
        self.tokens = 0  # generated so far, the stop token included
        self.finish: str | None = None  # why the answer is complete, once it is

    @property
    def begun(self) -> bool:
        """There was a token, shown or not."""
        return self.tokens > 0 or self.finish is not None

    def push(self, event: TokenEvent) -> Piece:
        """The piece for one event; its `finish` is set by the event or by a stop string."""
        assert self.finish is None
        echo, self._echo = self._echo, None
        before, entries = ("", ()) if echo is None else (echo.text, echo.entries(event.prompt))
        if echo is not None and echo.alone:
            self.finish = "length"
            return Piece(before, self.finish, (), entries, self._choice)
        self.tokens += 1
        # The text of a stop token, which may be an ordinary one (stop_token_ids), is not shown.
        text, start = "", self._offset
        if event.finish != "stop":
            text = self._decoder.push(event.token)
            start = _start(event.token, text, self._codec, before=start)
        entry = Entry(event.token, start, event.logprob, event.top)
        if event.finish is not None:
            text += self._decoder.flush()
        self._offset += len(text)
        shown, stopped = self._scanner.push(text, armed=self.tokens >= self._min_tokens)
        self.finish = "stop" if stopped else event.finish
        if self.finish is not None and not stopped:
            shown += self._scanner.flush()
        return Piece(before + shown, self.finish, (event.token,), (*entries, entry), self._choice)
