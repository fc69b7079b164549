"""Arguments of `pdnode bench transfer`: what is measured, with bounds and defaults."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from pdnode.bench.options import add_numbers

PROVIDERS = ("tcp", "tcp-rdm")
PATTERNS = ("scattered", "runs")
PAGE_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure; `size_bytes` of memory is a multiple of every page size."""

    providers: Sequence[str]
    page_bytes: Sequence[int]
    patterns: Sequence[str]
    pairs: int
    size_bytes: int
    raises: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    choices: tuple[tuple[str, type[int] | type[str], Sequence[object]], ...] = (
        ("provider", str, PROVIDERS),
        ("page-bytes", int, PAGE_BYTES),
        ("pattern", str, PATTERNS),
    )
    for name, kind, allowed in choices:
        parser.add_argument(
            f"--{name}",
            type=kind,
            choices=allowed,
            action="append",
            help="may be repeated; default: all",
        )
    add_numbers(
        parser,
        ("pairs", 9, 1000, 12, "alternating pairs per cell, over three connections"),
        ("mib", 4, 1024, 32, "memory of each side, MiB"),
        ("raises", 1, 60_000, 10_000, "raises of the layer counter per mode, 1 ms apart"),
    )


def plan_of(args: argparse.Namespace) -> Plan:
    return Plan(
        providers=args.provider or PROVIDERS,
        page_bytes=args.page_bytes or PAGE_BYTES,
        patterns=args.pattern or PATTERNS,
        pairs=args.pairs,
        size_bytes=args.mib << 20,
        raises=args.raises,
    )
