"""`pdnode bench rails`: its arguments."""

import argparse
from collections.abc import Callable
from typing import TypeVar

from pdnode.errors import Exit

_P = TypeVar("_P", bound=argparse.ArgumentParser)


def _run(args: argparse.Namespace) -> int:
    from pdnode.bench import rails

    result = rails.run(nics=args.nics, mbit=args.mbit, turns=args.turns, mib=args.mib)
    print(rails.as_json(result) if args.json else rails.as_line(result))
    return Exit.OK


def add_bench_rails(
    commands: "argparse._SubParsersAction[_P]",
    *,
    add_json: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Adds the subcommand. `add_json` gives it its `--json`."""
    from pdnode.bench.options import add_numbers

    text = "Compare several emulated NICs with one, and with a bare libfabric loop on all of them."
    command = commands.add_parser("rails", help=text, description=f"{text} Needs root.")
    command.set_defaults(run=_run)
    add_numbers(
        command,
        ("nics", 2, 8, 4, "how many"),
        ("mbit", 10, 100_000, 500, "rate of each, Mbit/s"),
        ("turns", 3, 1000, 9, "how often each is measured"),
        ("mib", 4, 1024, 32, "memory of each side, MiB"),
    )
    add_json(command)
