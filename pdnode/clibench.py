"""The `pdnode bench` commands: their arguments and exit codes. What measures is imported late."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pdnode.clirails import add_bench_rails
from pdnode.errors import Exit, UsageError

if TYPE_CHECKING:
    from pdnode.bench.options import Options

_P = TypeVar("_P", bound=argparse.ArgumentParser)


def _serve(demo_model: Callable[[], Path], args: argparse.Namespace) -> int:
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from pdnode.bench import report
    from pdnode.bench.options import options_of
    from pdnode.bench.serve import BenchError, LoadRun

    try:
        options = options_of(args)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.compare is True:
        model = Path(args.model_path).resolve() if args.model_path else demo_model()
        return _compare(args, options, model)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=options.requests * len(options.urls))
        run = LoadRun(options, lambda done: bar.update(task, completed=done))
        try:
            figures = asyncio.run(run.run())
        except BenchError as error:
            print(f"pdnode: {error}", file=sys.stderr)
            return Exit.UNAVAILABLE
    print((report.as_json if args.json else report.as_table)(options, figures))
    return Exit.OK if all(one.completed for one in figures) else Exit.UNAVAILABLE


def _compare(args: argparse.Namespace, options: "Options", model: Path) -> int:
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from pdnode.bench import compare_report
    from pdnode.bench.compare import Setting, compare, cores_for
    from pdnode.bench.options import CHUNK_TOKENS, DTYPE
    from pdnode.bench.serve import BenchError

    try:
        cores = cores_for(args.cores)
    except ValueError as error:
        raise UsageError(str(error)) from error
    setting = Setting(model, cores, args.chunk_tokens or CHUNK_TOKENS, args.dtype or DTYPE)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=1.0)
        try:
            found = asyncio.run(
                compare(
                    options,
                    setting,
                    lambda ratio, what: bar.update(task, completed=ratio, description=what),
                )
            )
        except BenchError as error:
            print(f"pdnode: {error}", file=sys.stderr)
            return Exit.UNAVAILABLE
        except asyncio.CancelledError:
            return Exit.FORCED
    print((compare_report.as_json if args.json else compare_report.as_table)(found))
    return Exit.UNAVAILABLE if any(one.errors for one in found.variants) else Exit.OK


def _transfer(args: argparse.Namespace) -> int:
    from pdnode.bench import plan, transfer

    transfer.run(plan.plan_of(args), as_json=args.json, out=print)
    return Exit.OK


def _step(args: argparse.Namespace) -> int:
    from pdnode.daemon import stepbench

    report = stepbench.run(requests=args.requests, passes=args.passes)
    print(stepbench.as_json(report) if args.json else stepbench.as_table(report))
    return Exit.OK


def _plan(args: argparse.Namespace) -> int:
    from pdnode.daemon import planbench

    report = planbench.run(rounds=args.rounds)
    print(planbench.as_json(report) if args.json else planbench.as_table(report))
    return Exit.OK


def add_bench_parsers(
    commands: "argparse._SubParsersAction[_P]",
    *,
    add_json: Callable[[argparse.ArgumentParser], None],
    demo_model: Callable[[], Path],
) -> None:
    """Adds the subcommands. `add_json` gives one its `--json`; `demo_model` fetches when needed."""
    from pdnode.bench import plan
    from pdnode.bench.options import add_arguments, add_numbers

    serve = commands.add_parser(
        "serve",
        help="offer load to a node and measure it",
        description="Offer load to one or two running nodes, or to nodes of its own (--compare), "
        "and measure latencies. Exit 69 where a node is not reachable or completes nothing.",
    )
    serve.set_defaults(run=partial(_serve, demo_model))
    add_arguments(serve)
    add_json(serve)
    description = "Compare the transfer core with a bare libfabric loop over loopback."
    transfer = commands.add_parser("transfer", help=description, description=description)
    transfer.set_defaults(run=_transfer)
    plan.add_arguments(transfer)
    add_json(transfer)
    description = "Time what a pass costs the daemon itself, beside a model that computes nothing."
    step = commands.add_parser("step", help=description, description=description)
    step.set_defaults(run=_step)
    add_numbers(
        step,
        ("requests", 1, 4095, 256, "requests at a time"),
        ("passes", 1, 100_000, 500, "of each kind"),
    )
    add_json(step)
    description = "Time the plan and the layer programs of a 131,072-token prompt, 8 ranks to 8."
    planning = commands.add_parser("plan", help=description, description=description)
    planning.set_defaults(run=_plan)
    add_numbers(planning, ("rounds", 2, 10_000, 51, "of each kind"))
    add_json(planning)
    add_bench_rails(commands, add_json=add_json)
