"""Text to token ids and back, and the chat template. Runs in the daemon, without torch."""

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from pdnode.errors import BadRequest, ConfigError, Problem
from pdnode.models.rawconfig import read_json

_MAX_TOKENIZER_BYTES = 256 << 20


class Tokenizer:
    """Tokenizer of a Hugging Face directory. Immutable; may be used from several threads.

    `end_tokens`: ids that end an answer (eos of generation_config.json, else of config.json or the
    tokenizer's). `has_chat_template`: whether `render_chat` can work.
    """

    def __init__(
        self, fast: FastTokenizer, chat: "ChatTemplate | None", end_tokens: frozenset[int]
    ) -> None:
        self._fast = fast
        self._chat = chat
        self._pieces = _token_bytes(fast)
        self._control = {
            number: token.content
            for number, token in fast.get_added_tokens_decoder().items()
            if token.special
        }
        self.vocabulary = fast.get_vocab_size(with_added_tokens=True)
        self.end_tokens = end_tokens

    @classmethod
    def load(cls, model_path: Path) -> "Tokenizer":
        """Read tokenizer.json and the files beside it. ConfigError names the file and the fault."""
        path = model_path / "tokenizer.json"
        try:
            if path.stat().st_size > _MAX_TOKENIZER_BYTES:
                raise ConfigError([Problem(str(path), f"over {_MAX_TOKENIZER_BYTES} bytes")])
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error
        try:
            kind = (json.loads(text).get("decoder") or {}).get("type")
            fast = FastTokenizer.from_str(text)
        except Exception as error:  # tokenizers raises no narrower one
            raise ConfigError([Problem(str(path), f"is no tokenizer: {error}")]) from error
        if kind != "ByteLevel":
            text = f"decoder {kind!r} is not supported; allowed: ByteLevel"
            raise ConfigError([Problem(str(path), text)])
        fast.no_truncation()
        fast.no_padding()
        settings = _optional_json(model_path / "tokenizer_config.json")
        source = settings.get("chat_template")
        template_file = model_path / "chat_template.jinja"
        if template_file.is_file():
            source = template_file.read_text(encoding="utf-8")
        chat = None
        if isinstance(source, str):
            names = ("bos_token", "eos_token", "unk_token", "pad_token")
            special = {name: _token_text(settings.get(name)) for name in names}
            chat = ChatTemplate(source, special, where=str(model_path))
        return cls(fast, chat, _end_tokens(model_path, fast, settings))

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special`: with what the model starts a text with, if anything.

        Control tokens written out in the text become those tokens.
        """
        # A batch of one: `encode` holds the GIL (286 ms for 512 KiB), `encode_batch` does not.
        batch = self._fast.encode_batch([text], add_special_tokens=add_special)
        ids: list[int] = batch[0].ids
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt for the assistant's next turn. BadRequest where the template refuses."""
        if self._chat is None:
            raise BadRequest("the model has no chat template; use /v1/completions", "messages")
        return self._chat.render(messages)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Token ids of `render_chat`, which writes the start of text itself."""
        return self.encode(self.render_chat(messages), add_special=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for control tokens and ids without a token."""
        return self._pieces[token] if token < len(self._pieces) else b""

    def control_name(self, token: int) -> str:
        """How a control token is written; "" for all others."""
        return self._control.get(token, "")

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without control tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def decoder(self) -> "Detokenizer":
        return Detokenizer(self)


class Detokenizer:
    """Turns one answer's tokens into text deltas that never hold half a character.

    The deltas, `flush` included, joined are `Tokenizer.decode` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Text that is complete with `token`; empty while a character is not."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", final=True)


class ChatTemplate:
    """A Jinja chat template in a sandbox: the model's author is not trusted with the daemon."""

    def __init__(self, source: str, special: Mapping[str, str], *, where: str) -> None:
        """ConfigError (naming `where`) if `source` is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError([Problem(f"{where}: chat_template", str(error))]) from error

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._special
            )
        except (TemplateError, TypeError, ValueError, OverflowError) as error:
            text = f"the model's chat template refuses these messages: {error}"
            raise BadRequest(text, "messages") from error


def _raise_exception(text: str) -> None:
    raise TemplateError(text)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE (GPT-2): printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


def _token_bytes(fast: FastTokenizer) -> list[bytes]:
    """The bytes of every token id. Added tokens stand for their own text, control ones for none."""
    alphabet = _byte_alphabet()
    vocabulary = fast.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, number in vocabulary.items():
        if all(character in alphabet for character in text):
            pieces[number] = bytes(alphabet[character] for character in text)
        else:
            pieces[number] = text.encode()
    for number, token in fast.get_added_tokens_decoder().items():
        pieces[number] = b"" if token.special else token.content.encode()
    return pieces


def _token_text(value: object) -> str:
    """A special token of tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _optional_json(path: Path) -> dict[str, object]:
    return read_json(path) if path.exists() else {}


def _end_tokens(
    model_path: Path, fast: FastTokenizer, settings: Mapping[str, object]
) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        found = _optional_json(model_path / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        numbers = [number for number in ids if isinstance(number, int)]
        if numbers:
            return frozenset(numbers)
    number = fast.token_to_id(_token_text(settings.get("eos_token")))
    return frozenset() if number is None else frozenset((number,))
