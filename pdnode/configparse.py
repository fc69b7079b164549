"""A decoded TOML file → values by the schema → records → rules between them. Pure.

All problems come at once, each named by table and key; configfile.py adds file and line.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdnode.config import DEMO_MODEL_DIR, Config, NicConfig
from pdnode.configkeys import Key, Table
from pdnode.configkinds import BadValue, HostPort, shown
from pdnode.configrules import (
    CROSS_RULES,
    TEST_PROVIDER_RULE,
    broken,
    is_wildcard,
    peers_are_local,
)
from pdnode.configschema import CONFIG_VERSION, DEMO_MODEL, TABLES
from pdnode.errors import Problem
from pdnode.types import Role

_PLACEHOLDERS: Mapping[str, object] = {
    "node.role": "colocated",
    "model.path": "/",
    "fabric.nics.name": "unread",
    "prefill.address": HostPort("localhost", 1),
}
"""Stand for required values that could not be read, until the problems are reported."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as it takes effect. `origin`: default, file, or flag."""

    where: str
    value: str  # as TOML writes it
    origin: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """`config` may be used only where `problems` is empty."""

    config: Config
    problems: list[Problem]
    settings: list[Setting]
    unread: frozenset[str]  # tables and keys whose values are only placeholders


class _Reader:
    """Walks the raw tables once and collects values, problems and settings."""

    def __init__(self, overrides: Mapping[str, object]) -> None:
        self._overrides = overrides
        self.problems: list[Problem] = []
        self.unread: set[str] = set()  # keys of the schema, without array indexes
        self.settings: list[Setting] = []
        self.values: dict[str, list[dict[str, object]]] = {}  # by table name

    def read(self, raw: Mapping[str, object]) -> None:
        self._check_names(raw, ["config_version", *_children("")], where="")
        for table in TABLES:
            parent, _, name = table.name.rpartition(".")
            outer = raw.get(parent, {}) if parent else raw
            given = outer.get(name) if isinstance(outer, Mapping) else None
            places = self._array(table, given) if table.many else self._single(table, given)
            self.values[table.name] = [self._table(table, item, at) for at, item in places]
            if not table.many and not places:
                values = {key.name: _placeholder(table, key) for key in table.keys}
                self.values[table.name] = [values]

    def _single(self, table: Table, given: object) -> list[tuple[str, Mapping[str, object]]]:
        if given is None:
            return [(table.name, {})]
        if isinstance(given, Mapping):
            return [(table.name, given)]
        self._unusable(table, f"expected a table [{table.name}], got {shown(given)}")
        return []

    def _array(self, table: Table, given: object) -> list[tuple[str, Mapping[str, object]]]:
        if given is None:
            return []
        items = given if isinstance(given, list) else []
        tables = [item for item in items if isinstance(item, Mapping)]
        if not isinstance(given, list) or len(tables) < len(items):
            self._unusable(table, f"expected tables [[{table.name}]], got {shown(given)}")
        elif len(tables) > table.most:
            self._unusable(table, f"{len(tables)} tables, at most {table.most} are taken")
        else:
            return [(f"{table.name}[{index}]", item) for index, item in enumerate(tables)]
        return []

    def _unusable(self, table: Table, text: str) -> None:
        self.problems.append(Problem(table.name, text))
        self.unread.add(table.name)
        self.unread.update(f"{table.name}.{key.name}" for key in table.keys)

    def _table(self, table: Table, raw: Mapping[str, object], where: str) -> dict[str, object]:
        known = [*(key.name for key in table.keys), *_children(table.name)]
        self._check_names(raw, known, where=where)
        return {key.name: self._value(table, key, raw, where) for key in table.keys}

    def _value(self, table: Table, key: Key, raw: Mapping[str, object], where: str) -> object:
        place = f"{where}.{key.name}"
        given: object = key.default
        origin = "default"
        if place in self._overrides:
            given, origin = self._overrides[place], "flag"
        elif key.name in raw:
            given, origin = raw[key.name], "file"
        try:
            if given is None:
                raise BadValue(f"required: {key.kind.allowed}")
            value = key.kind.read(given)
        except BadValue as error:
            self.problems.append(Problem(place, str(error)))
            self.unread.add(f"{table.name}.{key.name}")
            if table.many:
                self.unread.add(table.name)
            return _placeholder(table, key)
        self.settings.append(Setting(place, shown(given), origin))
        return value

    def _check_names(self, raw: Mapping[str, object], known: list[str], *, where: str) -> None:
        for name in raw:
            if name not in known:
                place = f"{where}.{name}" if where else name
                self.problems.append(Problem(place, f"unknown key{_hint(name, known)}"))


def _children(parent: str) -> list[str]:
    """Names of the tables directly under `parent`; the root is ""."""
    split = (table.name.rpartition(".") for table in TABLES)
    return [name for outer, _, name in split if outer == parent]


def _placeholder(table: Table, key: Key) -> object:
    if key.default is None:
        return _PLACEHOLDERS[f"{table.name}.{key.name}"]
    return key.kind.read(key.default)


def _hint(name: str, known: list[str]) -> str:
    """The table that has a key of this very name, else the nearest key of the same table."""
    homes = [table.name for table in TABLES if any(key.name == name for key in table.keys)]
    if homes:
        return f'; "{name}" belongs to [{homes[0]}]'
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near += [longer for longer in known if longer.startswith(name)]
    return f'; did you mean "{near[0]}"?' if near else f"; known here: {', '.join(known)}"


def _version_problem(raw: Mapping[str, object]) -> Problem | None:
    version = raw.get("config_version")
    if version is None:
        return Problem("config_version", f"required: config_version = {CONFIG_VERSION}")
    if type(version) is not int or version != CONFIG_VERSION:
        return Problem(
            "config_version",
            f"expected {CONFIG_VERSION}, the one this pdnode reads, got {shown(version)}",
        )
    return None


def _records(values: Mapping[str, list[dict[str, object]]]) -> Config:
    """Values of the tables as records; nothing is derived yet."""

    def fields(item: Mapping[str, object]) -> dict[str, object]:
        out: dict[str, object] = {}
        for name, value in item.items():
            if isinstance(value, HostPort):  # `listen` and `address` are kept as host and port
                out["host"], out["port"] = value
            else:
                out[name] = value
        return out

    tree: dict[str, object] = {
        table.name: fields(values[table.name][0]) for table in TABLES if not table.many
    }
    nics = [fields(item) for item in values["fabric.nics"]]
    tree["fabric"] = {**fields(values["fabric"][0]), "nics": nics}
    tree["prefill"] = [fields(item) for item in values["prefill"]]
    return msgspec.convert(tree, Config, dec_hook=_as_path)


def _as_path(kind: type, value: object) -> object:
    assert kind is Path, kind
    assert isinstance(value, str), value
    return Path(value)


def complete_nic(nic: NicConfig, role: Role) -> NicConfig:
    """`listen` and `advertise` follow from the address where they are not set."""
    if role is not Role.PREFILL:
        return nic
    listen = nic.listen or nic.address
    advertise = nic.advertise or (nic.address if is_wildcard(listen or "::") else listen)
    return dataclasses.replace(nic, listen=listen, advertise=advertise)


def default_nics(config: Config) -> tuple[NicConfig, ...]:
    """The NICs where none are listed: loopback, if the provider has it and all peers are here."""
    local = config.fabric.provider.startswith("tcp") and peers_are_local(config)
    if config.fabric.nics or not local or config.node.role is Role.COLOCATED:
        return config.fabric.nics
    return (NicConfig(name="lo", address="127.0.0.1", listen="", advertise=""),)


def _derive(config: Config, host_name: str) -> Config:
    """Fill in what follows from other values or from the host name."""
    replace = dataclasses.replace
    node = replace(config.node, id=config.node.id or host_name)
    path = config.model.path
    if str(path) == DEMO_MODEL:
        path = config.node.cache_dir / DEMO_MODEL_DIR
    model = replace(config.model, path=path, name=config.model.name or path.name)
    nics = tuple(complete_nic(nic, node.role) for nic in default_nics(config))
    fabric = replace(config.fabric, nics=nics)
    prefill = tuple(
        replace(peer, name=peer.name or f"{peer.host}:{peer.port}") for peer in config.prefill
    )
    return replace(config, node=node, model=model, fabric=fabric, prefill=prefill)


def _effective(settings: list[Setting], config: Config) -> list[Setting]:
    """`settings` with what was derived, and with the NICs that were not in the file."""
    derived: dict[str, str] = {
        "node.id": config.node.id,
        "model.path": str(config.model.path),
        "model.name": config.model.name,
    }
    for index, nic in enumerate(config.fabric.nics):
        for name in ("name", "address", "listen", "advertise"):
            derived[f"fabric.nics[{index}].{name}"] = str(getattr(nic, name))
    for index, peer in enumerate(config.prefill):
        derived[f"prefill[{index}].name"] = peer.name
    given = {setting.where for setting in settings}
    changed = [
        dataclasses.replace(setting, value=shown(derived[setting.where]))
        if setting.where in derived
        else setting
        for setting in settings
    ]
    return changed + [
        Setting(where, shown(value), "default")
        for where, value in derived.items()
        if where not in given and where.startswith("fabric.")
    ]


def parse_settings(
    raw: Mapping[str, object],
    *,
    overrides: Mapping[str, object],
    host_name: str,
    allow_test_provider: bool,
) -> Parsed:
    """As `parse`, with flags by "table.key" that outrank the file, and each value's origin."""
    reader = _Reader(overrides)
    version = _version_problem(raw)
    foreign = version is not None and "config_version" in raw
    # A file of another version has other keys: their problems would only mislead.
    reader.read({} if foreign else raw)
    config = _derive(_records(reader.values), host_name)
    rules = CROSS_RULES if allow_test_provider else (*CROSS_RULES, TEST_PROVIDER_RULE)
    problems = reader.problems + broken(config, rules, frozenset(reader.unread))
    if version is not None:
        problems = [version] if foreign else [version, *problems]
    return Parsed(config, problems, _effective(reader.settings, config), frozenset(reader.unread))


def parse(
    raw: Mapping[str, object], *, host_name: str = "localhost", allow_test_provider: bool = False
) -> Config | list[Problem]:
    """The configuration of a decoded TOML file, or everything that is wrong with it.

    The token is left out and the model directory is not looked at (`configfile.load` does both).
    `host_name` is the default of [node] id.
    """
    parsed = parse_settings(
        raw, overrides={}, host_name=host_name, allow_test_provider=allow_test_provider
    )
    return parsed.problems or parsed.config
