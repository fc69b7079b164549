"""The answers of the two generation routes in OpenAI's form, as structs that encode to it."""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec


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
    index: int = 0
    logprobs: None = None
    token_ids: MaybeTokens = msgspec.UNSET


class Message(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class MessageChoice(msgspec.Struct, frozen=True):
    message: Message
    finish_reason: str
    index: int = 0
    logprobs: None = None
    token_ids: MaybeTokens = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True):
    content: str
    role: str | msgspec.UnsetType = msgspec.UNSET


class DeltaChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None
    index: int = 0
    logprobs: None = None
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

    def whole(self, text: str, finish: str, usage: Usage, tokens: Sequence[int]) -> Answer:
        """The answer in one piece. `tokens`: what was generated, shown if asked for."""

    def chunk(self, text: str, finish: str | None, usage: MaybeUsage, token: int) -> Answer:
        """One chunk per generated token; the last carries the finish reason."""

    def usage_chunk(self, usage: Usage) -> Answer:
        """After the last token, with no choices."""


class CompletionForm:
    """POST /v1/completions."""

    def __init__(self, *, answer_id: str, model: str, created: int, token_ids: bool) -> None:
        self._id = f"cmpl-{answer_id}"
        self._model = model
        self._created = created
        self._token_ids = token_ids

    def whole(self, text: str, finish: str, usage: Usage, tokens: Sequence[int]) -> Answer:
        choice = TextChoice(text, finish, token_ids=_shown(tokens, self._token_ids))
        return self._answer((choice,), usage)

    def chunk(self, text: str, finish: str | None, usage: MaybeUsage, token: int) -> Answer:
        choice = TextChoice(text, finish, token_ids=_shown([token], self._token_ids))
        return self._answer((choice,), usage)

    def usage_chunk(self, usage: Usage) -> Answer:
        return self._answer((), usage)

    def _answer(self, choices: tuple[Choice, ...], usage: MaybeUsage) -> Answer:
        return Answer(self._id, "text_completion", self._created, self._model, choices, usage)


class ChatForm:
    """POST /v1/chat/completions. The role is in the first chunk, with the first token's text.

    A chunk of its own for the role would be one more than there are tokens, and benchmark clients
    take every chunk with choices for a token's time.
    """

    def __init__(self, *, answer_id: str, model: str, created: int, token_ids: bool) -> None:
        self._id = f"chatcmpl-{answer_id}"
        self._model = model
        self._created = created
        self._token_ids = token_ids
        self._started = False

    def whole(self, text: str, finish: str, usage: Usage, tokens: Sequence[int]) -> Answer:
        shown = _shown(tokens, self._token_ids)
        choice = MessageChoice(Message(text), finish, token_ids=shown)
        return self._answer("chat.completion", (choice,), usage)

    def chunk(self, text: str, finish: str | None, usage: MaybeUsage, token: int) -> Answer:
        delta = Delta(text) if self._started else Delta(text, "assistant")
        self._started = True
        choice = DeltaChoice(delta, finish, token_ids=_shown([token], self._token_ids))
        return self._answer("chat.completion.chunk", (choice,), usage)

    def usage_chunk(self, usage: Usage) -> Answer:
        return self._answer("chat.completion.chunk", (), usage)

    def _answer(
        self,
        kind: Kind,
        choices: tuple[Choice, ...],
        usage: MaybeUsage,
    ) -> Answer:
        return Answer(self._id, kind, self._created, self._model, choices, usage)


def _shown(tokens: Sequence[int], asked: bool) -> MaybeTokens:
    return tokens if asked else msgspec.UNSET
