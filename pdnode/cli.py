"""The command line. Parts are imported when a command needs them: `check-config` and `version`
import neither torch nor aiohttp, and work where libfabric is absent.

Standard output is data, standard error is talk. Exit codes are those of errors.Exit.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from pdnode import __version__
from pdnode.cliadmin import ADMIN_SOCKET, add_admin_parsers
from pdnode.clibench import add_bench_parsers
from pdnode.clifabric import add_fabric_test
from pdnode.configfile import load_settings
from pdnode.configparse import Setting
from pdnode.configschema import DEMO_MODEL, LOG_FORMATS
from pdnode.errors import ConfigError, DeviceMissing, Exit, PdnodeError, Problem, UsageError

DEFAULT_PROMPT = "What is the capital of France?"
MOCKS = ("healthy", "degraded", "stale", "empty")
SYSTEM_CACHE = Path("/var/cache/pdnode")
_log = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    """Long options only, never abbreviated; wrong usage exits with 64 instead of 2."""

    def __init__(self, *, prog: str | None = None, description: str | None = None) -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False)
        self.add_argument("--help", action="help", help="show this and exit")

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(Exit.USAGE, f"{self.prog}: {message}\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _exit_code(problems: Sequence[Problem]) -> Exit:
    """71 where the file is right and only the host lacks something, else 78."""
    return Exit.DEVICE_MISSING if all(problem.device for problem in problems) else Exit.CONFIG


def _config_path(args: argparse.Namespace) -> Path:
    path = args.config or os.environ.get("PDNODE_CONFIG")
    if not path:
        raise UsageError("--config FILE is required, or PDNODE_CONFIG in the environment")
    return Path(path)


def _serve(args: argparse.Namespace) -> int:
    overrides = {"node.log_format": args.log_format} if args.log_format else {}
    read = partial(
        load_settings,
        _config_path(args).absolute(),
        overrides=overrides,
        allow_test_provider=args.allow_test_provider,
    )
    loaded = read()
    from pdnode.confighost import check_host, resolve_host
    from pdnode.obs import log

    problems = check_host(loaded.config)
    if problems:
        raise ConfigError(problems)
    config = resolve_host(loaded.config)
    log.configure(level=config.node.log_level, log_format=config.node.log_format)
    from pdnode.daemon import node
    from pdnode.daemon.reload import ConfigSource

    return node.serve(config, ConfigSource(read, loaded))


def _check_config(args: argparse.Namespace) -> int:
    path = _config_path(args)
    problems: list[Problem] = []
    warnings: list[Problem] = []
    settings: tuple[Setting, ...] = ()
    nics: list[tuple[str, str]] = []
    try:
        loaded = load_settings(path, allow_test_provider=args.allow_test_provider)
        settings = loaded.settings
        if args.host:
            from pdnode.confighost import check_host, host_warnings, nic_notes

            nics = nic_notes(loaded.config)
            problems = check_host(loaded.config)
            warnings = host_warnings(loaded.config)
    except ConfigError as error:
        problems = error.problems
    if args.json:
        _print_check(problems, warnings, nics, settings if args.print_effective else None)
    else:
        for setting in settings if args.print_effective else ():
            print(f"{setting.where} = {setting.value}  # {setting.origin}")
        for name, reason in nics:
            _say(f"NIC {name}: {reason}")
        for problem in problems:
            _say(str(problem))
        for warning in warnings:
            _say(f"warning: {warning}")
        if not problems:
            _say(f"{path}: valid")
    return _exit_code(problems) if problems else Exit.OK


def _print_check(
    problems: Sequence[Problem],
    warnings: Sequence[Problem],
    nics: Sequence[tuple[str, str]],
    settings: Sequence[Setting] | None,
) -> None:
    out: dict[str, object] = {
        "valid": not problems,
        "problems": [{"where": problem.where, "text": problem.text} for problem in problems],
        "warnings": [{"where": warning.where, "text": warning.text} for warning in warnings],
        "nics": [{"name": name, "reason": reason} for name, reason in nics],
    }
    if settings is not None:
        out["settings"] = [
            {"key": setting.where, "value": setting.value, "origin": setting.origin}
            for setting in settings
        ]
    print(json.dumps(out))


def _demo(args: argparse.Namespace) -> int:
    model = Path(args.model) if args.model else _fetch(_cache_dir(args.cache_dir))
    from pdnode.daemon import demo

    return demo.run(
        model=model.resolve(),
        prompt=args.prompt,
        max_tokens=args.max_tokens,
        as_json=args.json,
    )


def _cache_dir(given: str | None) -> Path:
    """What is given, else the system's where we may write, else the user's."""
    if given:
        return Path(given).absolute()
    if os.access(SYSTEM_CACHE if SYSTEM_CACHE.is_dir() else SYSTEM_CACHE.parent, os.W_OK):
        return SYSTEM_CACHE
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdnode"


def _fetch(cache_dir: Path, name: str = DEMO_MODEL) -> Path:
    """The directory of a demo model; a bar on standard error where it has to be made."""
    from pdnode.models.fetch import DEMO_MODELS, fetch, is_complete, model_directory

    model = DEMO_MODELS[name]
    directory = model_directory(cache_dir, model)
    if is_complete(directory):
        return directory
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{name}: download", total=1.0)
        return fetch(
            cache_dir,
            lambda ratio, what: bar.update(task, completed=ratio, description=f"{name}: {what}"),
            model,
        )


def _model_fetch(args: argparse.Namespace) -> int:
    print(_fetch(_cache_dir(args.cache_dir), args.name))
    return Exit.OK


def _model_path(args: argparse.Namespace) -> int:
    from pdnode.models.fetch import DEMO_MODELS, is_complete, model_directory

    directory = model_directory(_cache_dir(args.cache_dir), DEMO_MODELS[args.name])
    if not is_complete(directory):
        _say(f"{directory} is not there; run `pdnode model fetch {args.name}`")
        return Exit.UNAVAILABLE
    print(json.dumps({"path": str(directory)}) if args.json else directory)
    return Exit.OK


def _model_list(args: argparse.Namespace) -> int:
    from pdnode.models.fetch import DEMO_MODELS, is_complete, model_directory

    cache_dir = _cache_dir(args.cache_dir)
    rows = [
        (name, model_directory(cache_dir, model), is_complete(model_directory(cache_dir, model)))
        for name, model in DEMO_MODELS.items()
    ]
    if args.json:
        print(json.dumps([{"name": n, "path": str(p), "fetched": there} for n, p, there in rows]))
    else:
        for name, path, there in rows:
            print(f"{name}  {path if there else 'not fetched'}")
    return Exit.OK


def _top(args: argparse.Namespace) -> int:
    from pdnode_tui.main import Options, run

    try:
        return run(
            Options(
                socket=Path(args.socket),
                interval_s=args.interval,
                readonly=args.readonly,
                once=args.once,
                as_json=args.json,
                ascii=args.ascii,
                mock=args.mock,
                replay=Path(args.replay) if args.replay else None,
            )
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _top_parser(top: argparse.ArgumentParser) -> None:
    top.set_defaults(run=_top)
    top.add_argument(
        "--socket", metavar="PATH", default=ADMIN_SOCKET, help=f"default: {ADMIN_SOCKET}"
    )
    top.add_argument(
        "--interval", metavar="S", type=float, default=1.0, help="0.2 to 10; default: 1"
    )
    top.add_argument("--readonly", action="store_true", help="offer no action")
    top.add_argument("--once", action="store_true", help="print one picture; so does no terminal")
    top.add_argument("--json", action="store_true", help="print the snapshot as the daemon gave it")
    top.add_argument("--ascii", action="store_true", help="draw with ASCII only")
    top.add_argument("--mock", choices=MOCKS, help="show a made-up node")
    top.add_argument("--replay", metavar="FILE", help="show what the key r recorded")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _libfabric() -> tuple[str | None, str | None]:
    """Path and version of the libfabric that "auto" finds; nothing where there is none."""
    import ctypes

    from pdnode.fabric.library import find_library

    try:
        path = str(find_library("auto", "tcp"))
        number = int(ctypes.CDLL(path).fi_version())
    except (DeviceMissing, OSError, AttributeError):
        return None, None
    return path, f"{number >> 16}.{number & 0xFFFF}"


def _version(args: argparse.Namespace) -> int:
    from pdnode.core.wire import PROTOCOL_MAX, PROTOCOL_MIN

    library, libfabric = _libfabric()
    if args.json:
        out = {
            "pdnode": __version__,
            "protocol": {"min": PROTOCOL_MIN, "max": PROTOCOL_MAX},
            "libfabric": libfabric,
            "library": library,
        }
        print(json.dumps(out))
        return Exit.OK
    print(f"pdnode {__version__}")
    print(f"peer protocol {PROTOCOL_MIN}..{PROTOCOL_MAX}")
    print(f"libfabric {libfabric} ({library})" if libfabric else "libfabric not found")
    return Exit.OK


def _topology(args: argparse.Namespace) -> int:
    """A topology file without --sysfs stands alone: it may be that of another machine."""
    from pdnode.topology.detect import detect
    from pdnode.topology.ncclxml import override, read_topology_file
    from pdnode.topology.place import place
    from pdnode.topology.report import as_json, as_lines
    from pdnode.topology.sysfs import LIVE
    from pdnode.topology.usable import Policy

    policy = Policy()
    path = Path(args.topology_file) if args.topology_file else None
    sysfs = Path(args.sysfs) if args.sysfs else None
    if args.config:
        config = load_settings(Path(args.config)).config
        wanted = config.topology
        policy = Policy(wanted.allow, wanted.deny, config.fabric.provider)
        sysfs = sysfs or LIVE
        path = path or (Path(wanted.file) if wanted.file else None)
    if sysfs is not None and not sysfs.is_dir():
        raise ConfigError([Problem("--sysfs", f"{sysfs} is not a directory")])
    file = read_topology_file(path) if path is not None else None
    if sysfs is None and file is not None:
        host = file
    else:
        host = detect(sysfs or LIVE)
        host = override(host, file) if file is not None else host
    placement = place(host, policy)
    notes: list[tuple[str, str]] = []
    if args.config and sysfs == LIVE:
        from pdnode.confighost import nic_notes

        notes = nic_notes(config)
    if args.json:
        extra = {"node": [{"name": name, "reason": text} for name, text in notes]} if notes else {}
        print(json.dumps(as_json(placement) | extra))
    else:
        print("\n".join([*as_lines(placement), *(f"node: {name} {text}" for name, text in notes)]))
    return Exit.OK


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="default: $PDNODE_CONFIG")
    parser.add_argument(
        "--allow-test-provider",
        action="store_true",
        help="take fabric.provider tcp-rdm, for tests and benchmarks",
    )


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help=f"where models are kept; default: {SYSTEM_CACHE} where it can be written to, "
        "else the user's cache directory",
    )


def _model_parser(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for name, run, description in (
        ("fetch", _model_fetch, "download and convert a demo model, once"),
        ("list", _model_list, "show the demo models"),
        ("path", _model_path, "print the directory of a demo model"),
    ):
        command = commands.add_parser(name, help=description, description=description)
        command.set_defaults(run=run)
        _add_cache(command)
        if name != "list":
            command.add_argument("name", choices=[DEMO_MODEL], help="which model")
        if name != "fetch":
            _add_json(command)


def _topology_parser(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_topology)
    parser.add_argument(
        "--config", metavar="FILE", help="take provider and [topology] from it; default: neither"
    )
    parser.add_argument("--sysfs", metavar="DIR", help="laid out as /sys is; default: /sys")
    parser.add_argument(
        "--topology-file",
        metavar="XML",
        help="in NCCL's form; alone it describes the whole host, with --sysfs only what is near",
    )
    _add_json(parser)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pdnode", description="LLM serving with prefill and decode split")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    serve = commands.add_parser("serve", help="run this node", description="Run this node.")
    serve.set_defaults(run=_serve)
    _add_config(serve)
    serve.add_argument("--log-format", choices=LOG_FORMATS, help="outranks node.log_format")

    check = commands.add_parser(
        "check-config",
        help="validate the configuration",
        description="Validate the configuration; all problems at once, exit 78 (71: only the host "
        "lacks something).",
    )
    check.set_defaults(run=_check_config)
    _add_config(check)
    check.add_argument("--host", action="store_true", help="also look at ports, NICs and limits")
    check.add_argument(
        "--print-effective", action="store_true", help="print every value and where it is from"
    )
    _add_json(check)

    demo = commands.add_parser(
        "demo",
        help="prefill and decode node on loopback, one question",
        description="Start a prefill and a decode node on loopback and ask one question.",
    )
    demo.set_defaults(run=_demo)
    demo.add_argument("--model", metavar="DIR", help="default: SmolLM2, fetched when needed")
    demo.add_argument("--prompt", metavar="TEXT", default=DEFAULT_PROMPT, help="the question")
    demo.add_argument("--max-tokens", metavar="N", type=_positive, default=64, help="default: 64")
    _add_cache(demo)
    _add_json(demo)

    _model_parser(commands.add_parser("model", help="demo models", description="Demo models."))

    bench = commands.add_parser("bench", help="measure a node", description="Measure.")
    add_bench_parsers(
        bench.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser),
        add_json=_add_json,
        demo_model=lambda: _fetch(_cache_dir(None)),
    )
    _topology_parser(
        commands.add_parser(
            "topology",
            help="GPUs, NICs, NUMA nodes of this host",
            description="Show which NICs and CPUs are near to which GPU, and why each was chosen.",
        )
    )
    add_admin_parsers(commands, add_json=_add_json)
    add_fabric_test(commands, add_json=_add_json)

    top = commands.add_parser("top", help="watch this node", description="Watch this node.")
    _top_parser(top)

    version = commands.add_parser("version", help="versions", description="Show versions.")
    version.set_defaults(run=_version)
    _add_json(version)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Wrong usage and --help leave by SystemExit."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except UsageError as error:
        parser.error(str(error))
    except ConfigError as error:
        for problem in error.problems:
            _say(str(problem))
        return _exit_code(error.problems)
    except DeviceMissing as error:
        _say(str(error))
        return Exit.DEVICE_MISSING
    except PdnodeError as error:
        _say(f"pdnode: {error}")
        return Exit.INTERNAL
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    except Exception:  # noqa: BLE001 - the last resort, so that the exit code stays one of ours
        _log.exception("internal error")
        return Exit.INTERNAL
