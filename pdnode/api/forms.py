"""The answers of the two generation routes in OpenAI's form, as structs that encode to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from pdnode.api.codec import TextCodec
from pdnode.api.logprobs import ChatLogprobs, TextLogprobs, chat_logprobs, text_logprobs
from pdnode.api.text import Piece


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0  # there is no prefix cache


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()

    @classmethod
    def of(cls, *, prompt: int, completion: int) -> "Usage":
        return cls(prompt, completion, prompt + completion)


MaybeUsage = Usage | msgspec.UnsetType | None
"""Unset: no `usage` field. None: the field is null, as in all chunks but the last."""


MaybeTokens = Sequence[int] | msgspec.UnsetType
"""Unset unless `return_token_ids` asks for the ids of the tokens behind the text."""


class TextChoice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: str | None
    index: int
    logprobs: TextLogprobs | None
    token_ids: MaybeTokens = msgspec.UNSET


class Message(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class MessageChoice(msgspec.Struct, frozen=True):
    message: Message
    finish_reason: str | None
    index: int
    logprobs: ChatLogprobs | None
    token_ids: MaybeTokens = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True):
    content: str
    role: str | msgspec.UnsetType = msgspec.UNSET


class DeltaChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None
    index: int
    logprobs: ChatLogprobs | None
    token_ids: MaybeTokens = msgspec.UNSET


Choice = TextChoice | MessageChoice | DeltaChoice
Kind = Literal["text_completion", "chat.completion", "chat.completion.chunk"]


class Answer(msgspec.Struct, frozen=True):
    """A whole answer, or one chunk of a stream. `usage` is left out of chunks unless asked for."""

    id: str
    object: Kind
    created: int  # seconds since 1970
    model: str
    choices: tuple[Choice, ...]
    usage: MaybeUsage = msgspec.UNSET
    system_fingerprint: None = None


class Form(Protocol):
    """How one route writes its answer."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """The answer in one piece: one finished piece per choice."""

    def chunk(self, piece: Piece, usage: MaybeUsage) -> Answer:
        """One chunk per generated token; the last of a choice carries the finish reason."""

    def usage_chunk(self, usage: Usage) -> Answer:
        """After the last token, with no choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What is the same in all chunks of an answer, and what the client wants to see in them."""

    answer_id: str
    model: str
    created: int
    token_ids: bool
    logprobs: bool


class CompletionForm:
    """POST /v1/completions."""

    def __init__(self, heading: Heading, codec: TextCodec) -> None:
        self._heading = heading
        self._codec = codec

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        return self._answer(tuple(map(self._choice, choices)), usage)

    def chunk(self, piece: Piece, usage: MaybeUsage) -> Answer:
        return self._answer((self._choice(piece),), usage)

    def usage_chunk(self, usage: Usage) -> Answer:
        return self._answer((), usage)

    def _choice(self, piece: Piece) -> TextChoice:
        logprobs = text_logprobs(piece.entries, self._codec) if self._heading.logprobs else None
        shown = _shown(piece.tokens, self._heading.token_ids)
        return TextChoice(piece.text, piece.finish, piece.choice, logprobs, shown)

    def _answer(self, choices: tuple[Choice, ...], usage: MaybeUsage) -> Answer:
        return _answer(self._heading, "cmpl", "text_completion", choices, usage)


class ChatForm:
    """POST /v1/chat/completions. The role is in the first chunk, with the first token's text.

    A chunk of its own for the role would be one more than there are tokens, and benchmark clients
    take every chunk with choices for a token's time.
    """

    def __init__(self, heading: Heading, codec: TextCodec) -> None:
        self._heading = heading
        self._codec = codec
        self._started: set[int] = set()

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        written = tuple(
            MessageChoice(
                Message(piece.text),
                piece.finish,
                piece.choice,
                self._logprobs(piece),
                _shown(piece.tokens, self._heading.token_ids),
            )
            for piece in choices
        )
        return _answer(self._heading, "chatcmpl", "chat.completion", written, usage)

    def chunk(self, piece: Piece, usage: MaybeUsage) -> Answer:
        started = piece.choice in self._started
        self._started.add(piece.choice)
        choice = DeltaChoice(
            Delta(piece.text) if started else Delta(piece.text, "assistant"),
            piece.finish,
            piece.choice,
            self._logprobs(piece),
            _shown(piece.tokens, self._heading.token_ids),
        )
        return _answer(self._heading, "chatcmpl", "chat.completion.chunk", (choice,), usage)

    def usage_chunk(self, usage: Usage) -> Answer:
        return _answer(self._heading, "chatcmpl", "chat.completion.chunk", (), usage)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(piece.entries, self._codec) if self._heading.logprobs else None


def _answer(
    heading: Heading, prefix: str, kind: Kind, choices: tuple[Choice, ...], usage: MaybeUsage
) -> Answer:
    answer_id = f"{prefix}-{heading.answer_id}"
    return Answer(answer_id, kind, heading.created, heading.model, choices, usage)


def _shown(tokens: Sequence[int], asked: bool) -> MaybeTokens:
    return tokens if asked else msgspec.UNSET
