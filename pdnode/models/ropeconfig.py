"""How rotary frequencies are stretched, from either spelling of config.json."""

import math
from dataclasses import dataclass

from pdnode.models.rawconfig import Reader

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`kind`: "none", "linear", "llama3" or "yarn"; what the other kinds use has no meaning."""

    kind: str = "none"
    factor: float = 1.0
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0
    original_context: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    whole_dims: bool = True
    amplitude: float = 1.0  # yarn: of the cosines and sines
    softmax_factor: float = 1.0  # of the softmax scale, in latent attention


def parse_rope(reader: Reader, context_tokens: int) -> tuple[float, RopeScaling]:
    """(theta, scaling) from `rope_parameters`, or from the older `rope_theta` + `rope_scaling`."""
    key = "rope_parameters" if reader.has("rope_parameters") else "rope_scaling"
    parameters = reader.raw.get(key) or {}
    if not isinstance(parameters, dict):
        reader.problem(key, f"{parameters!r} is not an object")
        return 1.0, RopeScaling()
    inner = Reader(parameters, within=key)
    for place in (reader, inner):
        if place.raw.get("partial_rotary_factor", 1.0) != 1.0:
            place.problem("partial_rotary_factor", "only 1.0 is supported")
    theta = (inner if inner.has("rope_theta") else reader).number("rope_theta", 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    scaling = RopeScaling()
    if kind == "linear":
        scaling = RopeScaling("linear", inner.number("factor"))
    elif kind == "llama3":
        scaling = _llama3(inner, context_tokens)
    elif kind == "yarn":
        scaling = _yarn(inner, context_tokens)
    elif kind != "default":
        inner.problem("rope_type", f"{kind!r} is not supported; allowed: {', '.join(KINDS)}")
    reader.problems += inner.problems
    return theta, scaling


def _llama3(inner: Reader, context_tokens: int) -> RopeScaling:
    scaling = RopeScaling(
        "llama3",
        inner.number("factor"),
        inner.number("low_freq_factor"),
        inner.number("high_freq_factor"),
        inner.integer("original_max_position_embeddings", context_tokens),
    )
    if scaling.high_frequency_factor <= scaling.low_frequency_factor:
        inner.problem("high_freq_factor", "is not above low_freq_factor")
    return scaling


def _yarn(inner: Reader, context_tokens: int) -> RopeScaling:
    """YaRN (arXiv 2309.00071), with the two `mscale` keys of DeepSeek's configuration."""
    original = inner.integer("original_max_position_embeddings", context_tokens)
    factor = inner.number("factor", context_tokens / original)
    of_angles, of_scores = (
        inner.number(key) if inner.raw.get(key) else 0.0 for key in ("mscale", "mscale_all_dim")
    )
    amplitude = _mscale(factor)
    if of_angles and of_scores:
        amplitude = _mscale(factor, of_angles) / _mscale(factor, of_scores)
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        whole_dims=inner.flag("truncate", default=True),
        amplitude=inner.number("attention_factor", amplitude),
        softmax_factor=_mscale(factor, of_scores) ** 2 if of_scores else 1.0,
    )


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
