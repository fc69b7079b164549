"""Log probabilities in OpenAI's two forms: parallel lists for completions, objects for chat.

They are the model's own: log-softmax of its logits before bias, penalties and temperature. There is
one entry per generated token, tokens without text included, so that they count as `usage` does.
"""

from collections.abc import Sequence

import msgspec

from pdnode.api.codec import TextCodec
from pdnode.api.text import Entry


class TextLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None  # None: a control token, which stands for no text


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


def text_logprobs(entries: Sequence[Entry], codec: TextCodec) -> TextLogprobs:
    """`top_logprobs` has the likeliest tokens and, if it is not among them, the token itself."""
    out = TextLogprobs([], [], [], [])
    for entry in entries:
        token = _text(entry.token, codec, prefix="bytes:")
        out.text_offset.append(entry.offset)
        out.token_logprobs.append(entry.logprob)
        out.tokens.append(token)
        if entry.logprob is None:
            out.top_logprobs.append(None)
            continue
        tops: dict[str, float] = {}
        for other, logprob in entry.top:
            # Two tokens may have one text: the likelier one stays.
            tops.setdefault(_text(other, codec, prefix="bytes:"), logprob)
        out.top_logprobs.append(tops | {token: entry.logprob})
    return out


def chat_logprobs(entries: Sequence[Entry], codec: TextCodec) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                _text(entry.token, codec),
                entry.logprob,
                _bytes(entry.token, codec),
                [TopLogprob(_text(t, codec), p, _bytes(t, codec)) for t, p in entry.top],
            )
            for entry in entries
        ]
    )


def _text(token: int, codec: TextCodec, *, prefix: str = "") -> str:
    """A token as text; one that is a part of a character as OpenAI writes it: `\\xf0\\x9f`."""
    data = codec.token_bytes(token)
    if not data:
        return codec.control_name(token) or f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _bytes(token: int, codec: TextCodec) -> list[int] | None:
    return list(codec.token_bytes(token)) or None
