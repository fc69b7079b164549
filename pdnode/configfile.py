"""Loads the configuration file and what it points to: credentials and the model directory.

Problems of the file carry its name and, where it is found, the line.
"""

import dataclasses
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli

from pdnode.config import DEMO_MODEL_DIR, Config
from pdnode.configparse import Parsed, Setting, parse_settings
from pdnode.errors import ConfigError, Problem
from pdnode.peertls import TlsError, load_tls
from pdnode.secretfile import SecretError, read_keys, read_secret

MAX_FILE_BYTES = 1 << 20
_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\s-]+?)\s*\]")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*=")


@dataclass(frozen=True, slots=True)
class Loaded:
    config: Config
    settings: tuple[Setting, ...]


def key_lines(text: str) -> dict[str, int]:
    """Line of each table and key, named as problems name them. Reads the common forms only."""
    lines: dict[str, int] = {}
    arrays: Counter[str] = Counter()
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = "".join(header[2].split())
            if header[1] == "[[":
                arrays[table] += 1
                table = f"{table}[{arrays[table] - 1}]"
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault(f"{table}.{assignment[1]}" if table else assignment[1], number)
    return lines


def _placed(problem: Problem, path: Path, lines: Mapping[str, int]) -> Problem:
    line = lines.get(problem.where) or lines.get(problem.where.rpartition(".")[0])
    place = f"{path}:{line}" if line else str(path)
    return dataclasses.replace(problem, where=f"{place}: {problem.where}")


def _read_toml(path: Path) -> tuple[dict[str, object], str]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError([Problem(str(path), f"larger than {MAX_FILE_BYTES} bytes")])
        text = data.decode()
        return tomli.loads(text), text
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(path), f"not UTF-8: {error.reason}")]) from error
    except tomli.TOMLDecodeError as error:
        text = f"not TOML: {error.msg} (column {error.colno})"
        raise ConfigError([Problem(f"{path}:{error.lineno}", text)]) from error
    except RecursionError as error:
        raise ConfigError([Problem(str(path), "not TOML: nested too deeply")]) from error


def model_problems(path: Path) -> list[Problem]:
    """What keeps `path` from being a model directory; its content is the loader's business."""
    hint = "; run `pdnode model fetch smollm2`" if path.match(str(DEMO_MODEL_DIR)) else ""
    if not path.is_dir():
        return [Problem("model.path", f"{path} is not a directory{hint}")]
    if not (path / "config.json").is_file():
        return [Problem("model.path", f"{path} has no config.json{hint}")]
    return []


def _with_secrets(parsed: Parsed) -> Config:
    """The configuration with what its credentials hold; a problem is added for each that cannot be
    read."""
    peer, api = parsed.config.peer, parsed.config.api
    token, tls = None, None
    keys: tuple[bytes, ...] = ()
    try:
        if peer.token_credential:
            token = read_secret(peer.token_credential)
    except SecretError as error:
        parsed.problems.append(Problem("peer.token_credential", str(error)))
    try:
        if api.keys_credential:
            keys = read_keys(api.keys_credential)
    except SecretError as error:
        parsed.problems.append(Problem("api.keys_credential", str(error)))
    try:
        if peer.tls_certificate and peer.tls_key and peer.tls_ca:
            tls = load_tls(certificate=peer.tls_certificate, key=peer.tls_key, ca=peer.tls_ca)
    except TlsError as error:
        parsed.problems.append(Problem(f"peer.{error.key}", str(error)))
    return dataclasses.replace(
        parsed.config,
        peer=dataclasses.replace(peer, token=token, tls=tls),
        api=dataclasses.replace(api, keys=keys),
    )


def load_settings(
    path: Path, *, overrides: Mapping[str, object] | None = None, allow_test_provider: bool = False
) -> Loaded:
    """The configuration and where each value came from. `overrides` are flags by "table.key"."""
    raw, text = _read_toml(path)
    parsed = parse_settings(
        raw,
        overrides=overrides or {},
        host_name=socket.gethostname(),
        allow_test_provider=allow_test_provider,
    )
    config = _with_secrets(parsed)
    if not {"model.path", "node.cache_dir"} & parsed.unread:
        parsed.problems.extend(model_problems(config.model.path))
    if parsed.problems:
        lines = key_lines(text)
        raise ConfigError([_placed(problem, path, lines) for problem in parsed.problems])
    return Loaded(config, tuple(parsed.settings))


def load(path: Path, *, allow_test_provider: bool = False) -> Config:
    """The configuration in `path`, token included. Raises ConfigError with all problems."""
    return load_settings(path, allow_test_provider=allow_test_provider).config
