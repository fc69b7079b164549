"""Statistics of a load run. Pure: times in, figures out. All times are seconds on one clock.

TTFT: request sent → first token. ITL: between neighbouring tokens of one request. TPOT: the mean
ITL of one request. E2E: request sent → end of its stream. Quantiles interpolate linearly.
"""

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

_METRICS = ("ttft_s", "itl_s", "tpot_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class Trace:
    """One request. A request with `error` counts there and in no latency."""

    start_s: float  # when it was due: lateness of the generator is not hidden
    token_s: Sequence[float]
    end_s: float
    error: str | None = None


class Quantiles(msgspec.Struct, frozen=True):
    p50: float
    p90: float
    p99: float
    max: float


class Background(msgspec.Struct, frozen=True):
    """ITL of streams that ran beside the load, by what the load did meanwhile."""

    streams: int
    idle_gaps: int
    idle_itl_s: Quantiles | None
    loaded_gaps: int
    loaded_itl_s: Quantiles | None


class Figures(msgspec.Struct, frozen=True):
    """What one target did. Latencies are None where no request gives any."""

    url: str
    model: str
    requests: int
    completed: int
    errors: dict[str, int]
    active_s: float  # while load was offered
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: Quantiles | None
    itl_s: Quantiles | None
    tpot_s: Quantiles | None
    e2e_s: Quantiles | None
    background: Background | None = None


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """None of nothing."""
    found = sorted(values)
    if not found:
        return None
    cuts = statistics.quantiles(found, n=100, method="inclusive") if found[1:] else found * 99
    return Quantiles(p50=cuts[49], p90=cuts[89], p99=cuts[98], max=found[-1])


def gaps(times: Sequence[float]) -> list[tuple[float, float]]:
    """(begin, end) between neighbouring tokens."""
    return list(pairwise(times))


def summarize(
    traces: Sequence[Trace],
    *,
    url: str,
    model: str,
    active_s: float,
    background: Background | None = None,
) -> Figures:
    good = [trace for trace in traces if trace.error is None]
    per_s = 1 / active_s if active_s > 0 else 0.0
    return Figures(
        url=url,
        model=model,
        requests=len(traces),
        completed=len(good),
        errors=dict(Counter(trace.error for trace in traces if trace.error is not None)),
        active_s=active_s,
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=sum(len(trace.token_s) for trace in good) * per_s,
        ttft_s=quantiles(trace.token_s[0] - trace.start_s for trace in good),
        itl_s=quantiles(end - begin for trace in good for begin, end in gaps(trace.token_s)),
        tpot_s=quantiles(
            (trace.token_s[-1] - trace.token_s[0]) / (len(trace.token_s) - 1)
            for trace in good
            if len(trace.token_s) > 1
        ),
        e2e_s=quantiles(trace.end_s - trace.start_s for trace in good),
        background=background,
    )


def split_gaps(
    found: Iterable[tuple[float, float]],
    *,
    idle: tuple[float, float],
    prompts: Sequence[tuple[float, float]],
) -> tuple[list[float], list[float]]:
    """Lengths of the gaps within the `idle` window, and of those that overlap one of `prompts`
    (request sent → first token). Gaps that are neither are left out."""
    busy: list[tuple[float, float]] = []  # `prompts`, joined where they overlap, in order
    for first, last in sorted(prompts):
        if busy and first <= busy[-1][1]:
            busy[-1] = (busy[-1][0], max(busy[-1][1], last))
        else:
            busy.append((first, last))
    quiet, loaded = [], []
    for begin, end in found:
        place = bisect_left(busy, (end,)) - 1  # the last one that begins before the gap ends
        if idle[0] <= begin and end <= idle[1]:
            quiet.append(end - begin)
        elif place >= 0 and begin < busy[place][1]:
            loaded.append(end - begin)
    return quiet, loaded


def ratios(first: Figures, second: Figures) -> dict[str, float]:
    """Medians of `second` over those of `first`, and throughput, for what both have."""
    out: dict[str, float] = {}
    for name in _METRICS:
        one, other = getattr(first, name), getattr(second, name)
        if one is not None and other is not None and one.p50 > 0:
            out[name] = other.p50 / one.p50
    if first.output_tokens_per_s > 0:
        out["output_tokens_per_s"] = second.output_tokens_per_s / first.output_tokens_per_s
    return out


def slowdown(background: Background) -> float | None:
    """p99 of the ITL under load over that of idle; None where one of them is missing."""
    idle, loaded = background.idle_itl_s, background.loaded_itl_s
    if idle is None or loaded is None or idle.p99 <= 0:
        return None
    return loaded.p99 / idle.p99
