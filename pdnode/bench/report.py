"""The report of a load run: one JSON document, or a table for people."""

from collections.abc import Sequence

import msgspec

from pdnode.bench.figures import Figures, Quantiles, ratios, slowdown
from pdnode.bench.options import Options

_ROWS = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))


def as_json(options: Options, figures: Sequence[Figures]) -> str:
    out: dict[str, object] = {"options": options, "targets": figures}
    if len(figures) == 2:
        out["ratios"] = ratios(*figures)
    return msgspec.json.encode(out).decode()


def as_table(options: Options, figures: Sequence[Figures]) -> str:
    """Times in milliseconds."""
    if options.rate:
        load = f"open loop, {options.rate:g} requests/s, at most {options.streams} at a time"
    else:
        load = f"closed loop, {options.streams} at a time"
    lines = [f"{options.prompt_tokens} tokens in, {options.output_tokens} out; {load}"]
    for one in figures:
        lines += ["", *_target_lines(one)]
    if len(figures) == 2:
        lines += ["", "second / first (medians)"]
        lines += [f"  {name:<20} {ratio:6.3f}" for name, ratio in ratios(*figures).items()]
    return "\n".join(lines)


def _target_lines(one: Figures) -> list[str]:
    errors = ", ".join(f"{kind} {count}" for kind, count in one.errors.items()) or "none"
    lines = [
        f"{one.url}  {one.model}",
        f"requests {one.requests}, completed {one.completed}, errors: {errors}; "
        f"{one.active_s:.1f} s",
        f"{one.output_tokens_per_s:.1f} output tokens/s, {one.requests_per_s:.2f} requests/s",
        f"{'ms':<22}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    lines += [_row(label, getattr(one, name)) for label, name in _ROWS]
    if one.background is not None:
        lines.append(_row("background ITL, idle", one.background.idle_itl_s))
        lines.append(_row("background ITL, load", one.background.loaded_itl_s))
        ratio = slowdown(one.background)
        if ratio is not None:
            lines.append(f"{'  p99, load / idle':<42}{ratio:>10.2f}")
    return lines


def _row(label: str, found: Quantiles | None) -> str:
    if found is None:
        return f"{label:<22}{'-':>10}"
    values = (found.p50, found.p90, found.p99, found.max)
    return f"{label:<22}" + "".join(f"{value * 1000:>10.2f}" for value in values)
