"""Validation of the bodies of the generation routes, before anything is admitted.

Three kinds of fields. Those that are built are read here, strictly typed. Those that would change
the answer and are not built are in the table below and are accepted only with the value that
changes nothing. All others are ignored and counted. `null` means absent everywhere.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from pdnode.api.fields import Fields, Neutral, kind_of, wrong_type
from pdnode.api.limits import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
)
from pdnode.api.sampling import (
    SamplingFields,
    read_chat_logprobs,
    read_sampling,
    read_text_logprobs,
)
from pdnode.errors import BadRequest

_MAX_COUNT = 1 << 31
_SEED_LOW, _SEED_HIGH = -(1 << 63), (1 << 63) - 1

NOT_BUILT = (
    Neutral("use_beam_search", (False,)),
    Neutral("length_penalty", (1,)),
    Neutral("min_p", (0,)),
    Neutral("bad_words", ([],)),
    Neutral("allowed_token_ids"),
    Neutral("prompt_logprobs"),
    Neutral("suffix", ("",)),
    Neutral("prompt_embeds"),
    Neutral("truncate_prompt_tokens"),
    Neutral("add_special_tokens", (True,)),
    Neutral("skip_special_tokens", (True,)),
    Neutral("include_stop_str_in_output", (False,)),
    Neutral("response_format", ({"type": "text"},)),
    Neutral("structured_outputs"),
    Neutral("guided_json"),
    Neutral("guided_regex"),
    Neutral("guided_choice"),
    Neutral("guided_grammar"),
    Neutral("tools", ([],)),
    Neutral("tool_choice", ("none", "auto")),
    Neutral("functions", ([],)),
    Neutral("function_call", ("none", "auto")),
    Neutral("modalities", (["text"],)),
    Neutral("audio"),
    Neutral("web_search_options"),
    Neutral("documents", ([],)),
    Neutral("chat_template"),
    Neutral("chat_template_kwargs", ({},)),
    Neutral("add_generation_prompt", (True,)),
    Neutral("continue_final_message", (False,)),
)
_NOT_IN_COMPLETIONS = (Neutral("top_logprobs", (0,)),)
_NOT_IN_CHAT = (Neutral("echo", (False,)),)
HARMLESS = ("user", "metadata", "store", "service_tier", "parallel_tool_calls")
"""Fields of OpenAI's API that do not change the answer here: ignored, and not counted."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ChatMessage(TypedDict):
    """What the chat template gets."""

    role: str  # "system", "user" or "assistant"
    content: str


class Sizes(NamedTuple):
    """What a request must fit: of the model, and of the KV pool."""

    vocabulary: int
    context_tokens: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFields:
    """What both routes have in common, as the client asked for it. None: not said."""

    model: str
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int  # 0: off
    top_p: float
    seed: int | None
    sampling: SamplingFields
    logprobs: int | None  # likeliest tokens beside each; None: no log probabilities
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool  # usage in every chunk, not only in the last
    return_token_ids: bool  # vLLM's name: `token_ids` in every choice
    unknown: int  # fields that were ignored


@dataclass(frozen=True, slots=True)
class CompletionFields:
    prompt: str | tuple[int, ...]
    echo: bool
    common: GenerationFields  # with echo max_tokens may be 0


@dataclass(frozen=True, slots=True)
class ChatFields:
    messages: tuple[ChatMessage, ...]
    common: GenerationFields


def read_completion(body: dict[str, object], sizes: Sizes) -> CompletionFields:
    """Fields of POST /v1/completions. Raises errors.BadRequest for the first that is wrong."""
    fields = Fields(body)
    prompt = _prompt(fields, sizes)
    fields.neutral(_NOT_IN_COMPLETIONS)
    echo, logprobs = fields.boolean("echo"), read_text_logprobs(fields)
    common = _common(fields, sizes.vocabulary, logprobs, least_tokens=0 if echo else 1)
    return CompletionFields(prompt, echo, common)


def read_chat(body: dict[str, object], sizes: Sizes) -> ChatFields:
    """Fields of POST /v1/chat/completions. Raises errors.BadRequest for the first that is wrong."""
    fields = Fields(body)
    messages = _messages(fields)
    fields.neutral(_NOT_IN_CHAT)
    logprobs = read_chat_logprobs(fields)
    return ChatFields(messages, _common(fields, sizes.vocabulary, logprobs, least_tokens=1))


def check_length(tokens: int, param: str, sizes: Sizes) -> None:
    """Refuse a prompt that leaves no room for one generated token."""
    limit = min(sizes.context_tokens, sizes.capacity_tokens)
    if tokens >= limit:
        what = "context" if limit == sizes.context_tokens else "KV cache"
        raise BadRequest(
            f"{param}: {tokens} tokens, and the {what} holds {limit}, "
            "at least 1 of them for the answer",
            param,
            "context_length_exceeded",
        )


def fit(tokens: int, fields: GenerationFields, *, default: int | None, sizes: Sizes) -> int:
    """Tokens to generate after a prompt of `tokens`, which has passed check_length.

    Without a wish of the client's it is `default` (None: all that fits), cut to what fits.
    """
    room = min(sizes.context_tokens, sizes.capacity_tokens) - tokens
    if fields.max_tokens is None:
        allowed = room if default is None else min(default, room)
        if fields.min_tokens > allowed:
            raise BadRequest(
                f"min_tokens: {fields.min_tokens} is above the {allowed} tokens to be generated",
                "min_tokens",
            )
        return allowed
    if fields.max_tokens > room:
        what = "context" if sizes.context_tokens <= sizes.capacity_tokens else "KV cache"
        raise BadRequest(
            f"max_tokens: {tokens + fields.max_tokens} tokens are needed ({tokens} in the prompt, "
            f"{fields.max_tokens} to generate); {tokens + room} are available in the {what}",
            "max_tokens",
            "context_length_exceeded",
        )
    return fields.max_tokens


def _common(
    fields: Fields, vocabulary: int, logprobs: int | None, *, least_tokens: int
) -> GenerationFields:
    model = fields.string("model")
    if not model:
        raise BadRequest("model: the name of a model is needed", "model")
    fields.neutral(NOT_BUILT)
    for name in HARMLESS:
        fields.take(name)
    max_tokens = _max_tokens(fields, least_tokens)
    min_tokens = fields.integer("min_tokens", low=0, high=_MAX_COUNT) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens: {min_tokens} is above max_tokens, {max_tokens}", "min_tokens"
        )
    stream = fields.boolean("stream")
    include_usage, continuous_usage = _stream_options(fields, stream)
    return GenerationFields(
        model=model,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=fields.number("temperature", default=1.0, low=0.0, high=2.0),
        # -1 is how vLLM's clients say "off".
        top_k=max(fields.integer("top_k", low=-1, high=_MAX_COUNT) or 0, 0),
        top_p=fields.number("top_p", default=1.0, low=0.0, high=1.0, above=True),
        seed=fields.integer("seed", low=_SEED_LOW, high=_SEED_HIGH),
        sampling=read_sampling(fields, vocabulary),
        logprobs=logprobs,
        stop=_stop(fields),
        stop_token_ids=frozenset(
            _token_ids(fields, "stop_token_ids", vocabulary, limit=MAX_STOP_TOKENS)
        ),
        ignore_eos=fields.boolean("ignore_eos"),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=fields.boolean("return_token_ids"),
        unknown=fields.unknown(),
    )


def _max_tokens(fields: Fields, least: int) -> int | None:
    old = fields.integer("max_tokens", low=least, high=_MAX_COUNT)
    new = fields.integer("max_completion_tokens", low=least, high=_MAX_COUNT)
    if old is not None and new is not None and old != new:
        raise BadRequest(
            f"max_tokens: {old} contradicts max_completion_tokens, {new}; give one of them",
            "max_tokens",
        )
    return old if new is None else new


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    options = fields.child("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise BadRequest("stream_options: allowed only with stream = true", "stream_options")
    include = options.boolean("include_usage")
    return include, options.boolean("continuous_usage_stats") and include


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        raise wrong_type("stop", value, "a string or a list of strings")
    if len(entries) > MAX_STOPS:
        raise BadRequest(f"stop: {len(entries)} strings; at most {MAX_STOPS} are allowed", "stop")
    stops: list[str] = []
    for entry in entries:
        if not isinstance(entry, str):
            raise wrong_type("stop", entry, "a string or a list of strings")
        if not 1 <= len(entry) <= MAX_STOP_CHARACTERS:
            raise BadRequest(
                f"stop: a string of {len(entry)} characters; "
                f"1 to {MAX_STOP_CHARACTERS} are allowed",
                "stop",
            )
        stops.append(entry)
    return tuple(stops)


def _token_ids(fields: Fields, name: str, vocabulary: int, *, limit: int) -> tuple[int, ...]:
    return check_token_ids(fields.items(name, limit=limit) or [], name, vocabulary)


def check_token_ids(entries: list[object], name: str, vocabulary: int) -> tuple[int, ...]:
    """`entries` as token ids below `vocabulary`; errors.BadRequest names the first that is none."""
    ids: list[int] = []
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise wrong_type(name, entry, "a list of integers")
        if not 0 <= entry < vocabulary:
            raise BadRequest(
                f"{name}: token id {entry} is outside the vocabulary, 0 to {vocabulary - 1}", name
            )
        ids.append(entry)
    return tuple(ids)


def _prompt(fields: Fields, sizes: Sizes) -> str | tuple[int, ...]:
    """A string, a list of one string, token ids, or a list of one list of token ids."""
    value = fields.take("prompt")
    if value is None:
        raise BadRequest("prompt: a string or a list of token ids is needed", "prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise BadRequest(
                f"prompt: {len(value)} prompts in one request are not supported; allowed: 1",
                "prompt",
            )
        value = value[0]
    if not isinstance(value, str | list):
        raise BadRequest(
            f"prompt: a string or a list of token ids is expected, not {kind_of(value)}", "prompt"
        )
    if not value:
        raise BadRequest("prompt: it is empty; at least 1 token is needed", "prompt")
    if isinstance(value, str):
        return value
    check_length(len(value), "prompt", sizes)  # first: checking a million ids takes its time
    return check_token_ids(value, "prompt", sizes.vocabulary)


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    entries = fields.items("messages", limit=MAX_MESSAGES)
    if not entries:
        raise BadRequest("messages: at least 1 message is needed", "messages")
    return tuple(_message(entry, f"messages[{place}]") for place, entry in enumerate(entries))


def _message(entry: object, path: str) -> ChatMessage:
    if not isinstance(entry, dict):
        raise wrong_type(path, entry, "an object")
    fields = Fields(entry, f"{path}.")
    role = fields.string("role")
    if role not in _ROLES:
        raise BadRequest(
            f"{path}.role: one of {', '.join(_ROLES)} is expected"
            + (f", not {role[:32]!r}" if role else ""),
            f"{path}.role",
        )
    fields.neutral((Neutral("tool_calls", ([],)), Neutral("function_call"), Neutral("audio")))
    content = _content(fields.take("content"), f"{path}.content")
    return ChatMessage(role=_ROLES[role], content=content)


def _content(value: object, path: str) -> str:
    """A string, or a list of text parts, joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(path, value, "a string or a list of text parts")
    if not 1 <= len(value) <= MAX_CONTENT_PARTS:
        raise BadRequest(f"{path}: {len(value)} parts; 1 to {MAX_CONTENT_PARTS} are allowed", path)
    texts: list[str] = []
    for place, part in enumerate(value):
        where = f"{path}[{place}]"
        if not isinstance(part, dict):
            raise wrong_type(where, part, "an object")
        fields = Fields(part, f"{where}.")
        if fields.string("type") != "text":
            raise BadRequest(f'{where}.type: only "text" is supported', f"{where}.type")
        text = fields.string("text")
        if text is None:
            raise BadRequest(f"{where}.text: a string is needed", f"{where}.text")
        texts.append(text)
    return "".join(texts)
