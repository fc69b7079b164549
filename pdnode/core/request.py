"""A generation request and its token events: what the API hands to the service, and gets back."""

from collections.abc import Sequence
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
    logprobs: int = 0  # likeliest tokens that each event names with their log probability
    score_prompt: bool = False
    """Also log probabilities of the prompt: they need its logits, so no peer may compute it."""
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    traceparent: str = ""  # W3C trace context of the client, checked; "": it gave none


class Score(NamedTuple):
    """Log probability of a known token under the model, and the likeliest ones in its place."""

    logprob: float
    top: Sequence[tuple[int, float]]  # (token, log probability), likeliest first


class TokenEvent(NamedTuple):
    """One generated token. `finish` is set on the last one: "stop" (a stop token) or "length"."""

    token: int
    logprob: float
    finish: str | None
    top: Sequence[tuple[int, float]] = ()  # as many as `Request.logprobs`, likeliest first
    prompt: Sequence[Score] = ()
    """With `score_prompt`, on the first event: of the prompt's second token, third, …"""
