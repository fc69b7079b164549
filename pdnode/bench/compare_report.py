"""The report of a comparison: one JSON document, or a table for people."""

import msgspec

from pdnode.bench.compare import SPLIT, Comparison, Variant
from pdnode.bench.figures import Quantiles


def as_json(found: Comparison) -> str:
    return msgspec.json.encode(found).decode()


def as_table(found: Comparison) -> str:
    """Times in milliseconds. In Markdown, so that it can stand in a document as it is."""
    head = (
        "ms", "cores", "TTFT p50", "TTFT max", "ITL p50", "ITL p99", "beside prompts: ITL p50",
        "ITL p99", "ITL max", "p99 / alone", "TTFT p50",
    )  # fmt: skip
    lines = [
        f"{found.prompt_tokens} tokens a prompt, {found.background_streams} streams, "
        f"{found.rounds} rounds, {found.dtype}; load average before: {found.load_average:.1f}, "
        f"cores taken by other processes meanwhile: {found.others_ratio:.0%}",
        "",
        "| " + " | ".join(head) + " |",
        "|---|---|" + "--:|" * (len(head) - 2),
        *(_row(one) for one in found.variants),
        "",
    ]
    lines += [
        f"TTFT, {SPLIT} minus {name}: {1e3 * seconds:+.0f} ms"
        for name, seconds in found.ttft_minus_s.items()
    ]
    lines += [
        f"{one.name}: failed requests: {kind} {count}"
        for one in found.variants
        for kind, count in one.errors.items()
    ]
    return "\n".join(lines)


def _row(one: Variant) -> str:
    alone, beside = one.idle_itl_s, one.loaded_itl_s
    slowdown = "-" if one.slowdown is None else f"{one.slowdown:.2f}"
    cells = (
        one.name, one.cores, _ms(one.ttft_s, "p50"), _ms(one.ttft_s, "max"), _ms(alone, "p50"),
        _ms(alone, "p99"), _ms(beside, "p50"), _ms(beside, "p99"), _ms(beside, "max"), slowdown,
        _ms(one.loaded_ttft_s, "p50"),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _ms(found: Quantiles | None, name: str) -> str:
    return "-" if found is None else f"{1e3 * float(getattr(found, name)):,.0f}"
