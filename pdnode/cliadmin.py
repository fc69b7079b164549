"""The commands that talk to a running node: their arguments and exit codes. See adminclient.py."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pdnode.errors import Exit
from pdnode.types import Role

ADMIN_SOCKET = "/run/pdnode/admin.sock"
_P = TypeVar("_P", bound=argparse.ArgumentParser)


def _admin(args: argparse.Namespace) -> int:
    from pdnode import adminclient

    client = adminclient.AdminClient(Path(args.socket))
    try:
        if args.action == "status":
            return adminclient.status(client, as_json=args.json)
        if args.action == "drain":
            return adminclient.drain(client, timeout_s=args.timeout_s, as_json=args.json)
        if args.action == "role":
            return adminclient.change_role(
                client, args.role, timeout_s=args.timeout_s, as_json=args.json
            )
        fields = {"request_id": args.request_id} if args.action == "cancel" else {}
        return adminclient.act(client, args.action, as_json=args.json, **fields)
    except adminclient.Unreachable as error:
        print(error, file=sys.stderr)
        return Exit.UNAVAILABLE
    except adminclient.TooSlow as error:
        print(error, file=sys.stderr)
        return Exit.TRY_AGAIN


def add_admin_parsers(
    commands: "argparse._SubParsersAction[_P]",
    *,
    add_json: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Adds the subcommands. `add_json` gives one its `--json`."""
    for name, text in (
        ("status", "show what the daemon does"),
        ("drain", "take no new work, and wait until what is there is done (75: not in time)"),
        ("undrain", "take work again"),
        ("cancel", "end one request"),
        ("role", "drain, then go on in another role, and wait for it (75: not in time)"),
        ("reload", "read the configuration file again (78: not taken)"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(run=_admin, action=name)
        command.add_argument(
            "--socket", metavar="PATH", default=ADMIN_SOCKET, help=f"default: {ADMIN_SOCKET}"
        )
        if name == "role":
            command.add_argument("role", metavar="ROLE", choices=list(Role), help=" | ".join(Role))
        if name in ("drain", "role"):
            command.add_argument(
                "--timeout-s", metavar="S", type=_seconds, default=240.0, help="default: 240"
            )
        if name == "cancel":
            command.add_argument("request_id", metavar="REQUEST_ID", help="as log and status say")
        add_json(command)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise ValueError(text)
    return value
