"""What the API needs of a tokenizer. `models.tokenizer` has one; tests bring a small one."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Turns the tokens of one answer into text. One per request."""

    def push(self, token: int) -> str:
        """Text that is complete with this token; "" while a character is not. No special tokens."""

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""


class TextCodec(Protocol):
    """Called on the event loop; `encode` and `encode_chat` on another thread at the same time."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer unless `ignore_eos` is set."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a plain prompt, with what the model puts before one (begin-of-text)."""

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> Sequence[int]:
        """Token ids of a conversation by the chat template, up to where the answer begins.

        Messages have `role` ("system", "user" or "assistant") and `content`, a string. Raises
        errors.BadRequest when the model has no template or the template refuses them.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without control tokens; what is no character becomes U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for control tokens and ids without a token."""

    def control_name(self, token: int) -> str:
        """How a control token is written, "<|im_end|>"; "" for all others."""

    def decoder(self) -> TextDecoder: ...
