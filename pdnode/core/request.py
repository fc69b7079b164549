"""A generation request and its token events: what the API hands to the service, and gets back."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Request:
    """A validated, tokenized request. Ids are below the vocabulary; lengths fit the context."""

    request_id: str
    prompt: tuple[int, ...]  # at least one token
    max_tokens: int  # at least 1; prompt + max_tokens ≤ context
    min_tokens: int
    stop_tokens: frozenset[int]  # end-of-text unless ignore_eos, and stop_token_ids
    temperature: float  # 0: greedy
    top_k: int  # 0: off
    top_p: float
    seed: int
    priority: int = 0


class TokenEvent(NamedTuple):
    """One generated token. `finish` is set on the last one: "stop" (a stop token) or "length"."""

    token: int
    logprob: float
    finish: str | None
