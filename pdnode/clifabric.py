"""`pdnode fabric-test PEER`: has the running daemon measure its NICs against those of a peer."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pdnode.cliadmin import ADMIN_SOCKET
from pdnode.errors import Exit

_P = TypeVar("_P", bound=argparse.ArgumentParser)


def _fabric_test(args: argparse.Namespace) -> int:
    import msgspec
    from rich.console import Console
    from rich.progress import Progress

    from pdnode import adminclient
    from pdnode.obs.fabric_report import as_lines

    client = adminclient.AdminClient(Path(args.socket))
    report = None
    try:
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(args.peer)
            for step in client.steps(args.peer):
                bar.update(task, completed=step.done, total=step.total, description=step.text)
                report = step.report
    except adminclient.Unreachable as error:
        print(error, file=sys.stderr)
        return Exit.UNAVAILABLE
    if report is None:
        print("the daemon ended the test without a report", file=sys.stderr)
        return Exit.INTERNAL
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(as_lines(report)))
    return Exit.OK if report.ok else Exit.UNAVAILABLE


def add_fabric_test(
    commands: "argparse._SubParsersAction[_P]",
    *,
    add_json: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Adds the subcommand. `add_json` gives it its `--json`."""
    text = "measure every NIC pair to a peer, and say what is wrong"
    command = commands.add_parser(
        "fabric-test",
        help=text,
        description="Measure every NIC pair between this decode node and a prefill peer while both "
        "work, and say in words what is wrong (exit 69).",
    )
    command.set_defaults(run=_fabric_test)
    command.add_argument("peer", metavar="PEER", help="name of its [[prefill]] table")
    command.add_argument(
        "--socket", metavar="PATH", default=ADMIN_SOCKET, help=f"default: {ADMIN_SOCKET}"
    )
    add_json(command)
