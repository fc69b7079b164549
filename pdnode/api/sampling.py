"""Fields that change which tokens are drawn, and how many answers there are."""

from dataclasses import dataclass

from pdnode.api.fields import Fields, wrong_type
from pdnode.api.limits import (
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
)
from pdnode.errors import BadRequest

_MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """As core.request.Request has them; `n` choices, each a generation of its own."""

    n: int
    logit_bias: tuple[tuple[int, float], ...]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float


def read_sampling(fields: Fields, vocabulary: int) -> SamplingFields:
    """Raises errors.BadRequest for the first that is wrong."""
    n = fields.integer("n", low=1, high=MAX_CHOICES) or 1
    best_of = fields.integer("best_of", low=1, high=MAX_CHOICES)
    if best_of is not None and best_of != n:
        raise BadRequest(
            f"best_of: {best_of} is not supported; allowed: {n}, which is n, or nothing", "best_of"
        )
    return SamplingFields(
        n=n,
        logit_bias=_logit_bias(fields, vocabulary),
        presence_penalty=_penalty(fields, "presence_penalty"),
        frequency_penalty=_penalty(fields, "frequency_penalty"),
        repetition_penalty=fields.number(
            "repetition_penalty", default=1.0, low=0.0, high=MAX_REPETITION_PENALTY, above=True
        ),
    )


def read_text_logprobs(fields: Fields) -> int | None:
    """How many likeliest tokens a completion names per token; None: no log probabilities."""
    return fields.integer("logprobs", low=0, high=MAX_LOGPROBS)


def read_chat_logprobs(fields: Fields) -> int | None:
    """The same for chat, which has a switch and a number."""
    top = fields.integer("top_logprobs", low=0, high=MAX_LOGPROBS) or 0
    if fields.boolean("logprobs"):
        return top
    if top:
        raise BadRequest("top_logprobs: allowed only with logprobs = true", "top_logprobs")
    return None


def _penalty(fields: Fields, name: str) -> float:
    return fields.number(name, default=0.0, low=-MAX_PENALTY, high=MAX_PENALTY)


def _logit_bias(fields: Fields, vocabulary: int) -> tuple[tuple[int, float], ...]:
    """An object of token ids, written as strings, with a number each."""
    name = "logit_bias"
    value = fields.take(name)
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    if len(value) > MAX_BIASED_TOKENS:
        raise BadRequest(
            f"{name}: {len(value)} tokens; at most {MAX_BIASED_TOKENS} are allowed", name
        )
    entries = Fields(value, f"{name}.")
    found: dict[int, float] = {}
    for key in value:
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else -1
        if not 0 <= token < vocabulary or token in found:
            raise BadRequest(
                f"{name}: {key[:32]!r} is no token id; allowed: 0 to {vocabulary - 1}, each once",
                name,
            )
        found[token] = entries.number(key, default=0.0, low=-_MAX_BIAS, high=_MAX_BIAS)
    return tuple(found.items())
