"""The pure part: values, defaults in one place, and that no input makes it fail."""

import dataclasses
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdnode.config import (
    ApiConfig,
    Config,
    EngineConfig,
    FabricConfig,
    KvConfig,
    MetricsConfig,
    PeerConfig,
)
from pdnode.configkinds import BadValue, HostPort, format_size, parse_host_port, parse_size
from pdnode.configparse import parse
from pdnode.configschema import TABLES

MINIMAL: dict[str, object] = {
    "config_version": 1,
    "node": {"role": "colocated"},
    "model": {"path": "/models/m"},
}


def parsed(**tables: object) -> Config:
    config = parse({**MINIMAL, **tables}, host_name="host-7")
    assert isinstance(config, Config), config
    return config


def test_defaults_of_schema_and_records_are_the_same() -> None:
    config = parsed()
    assert config.engine == EngineConfig()
    assert config.kv == KvConfig()
    assert config.fabric == FabricConfig()
    assert config.api == ApiConfig()
    assert config.peer == PeerConfig()
    assert config.metrics == MetricsConfig()
    node = type(config.node)(id="host-7", role=config.node.role)
    assert config.node == node


def test_every_key_of_the_schema_reaches_its_record() -> None:
    """By count: a key that no record has would be dropped without a word."""
    records = {
        "node": "node", "model": "model", "engine": "engine", "kv": "kv", "fabric": "fabric",
        "api": "api", "peer": "peer", "metrics": "metrics",
    }  # fmt: skip
    for table in TABLES:
        if table.name not in records:
            continue
        record = getattr(parsed(), records[table.name])
        fields = {field.name for field in dataclasses.fields(record)}
        fields -= {"nics", "token", "tls", "keys"}  # what credentials hold
        fields -= {"device_reason", "homes"}  # what the host decided
        names = {key.name for key in table.keys}
        if "listen" in names:
            names = names - {"listen"} | {"host", "port"}
        assert fields == names, table.name


@pytest.mark.parametrize(
    ("text", "size"),
    [("0B", 0), ("1KiB", 1024), ("64GiB", 64 << 30), ("3TiB", 3 << 40), ("1023B", 1023)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert format_size(size) == text


@pytest.mark.parametrize("text", ["64G", "64GB", "64gib", "64", "", "-1GiB", "1.5GiB", "1 GiB"])
def test_sizes_that_are_refused(text: str) -> None:
    with pytest.raises(BadValue):
        parse_size(text)


@given(st.integers(0, 1 << 62))
def test_format_size_is_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", HostPort("127.0.0.1", 80)),
        ("[::]:0", HostPort("::", 0)),
        ("node-1.rack.example:65535", HostPort("node-1.rack.example", 65535)),
    ],
)
def test_addresses(text: str, address: HostPort) -> None:
    assert parse_host_port(text) == address


@pytest.mark.parametrize(
    "text",
    [":80", "a", "a:", "a:b", "a:-1", "a:65536", "::1:80", "[a]:80", "[::1]", "a b:1", "a:٣"],
)
def test_addresses_that_are_refused(text: str) -> None:
    with pytest.raises(BadValue):
        parse_host_port(text)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "1GiB", "127.0.0.1:1", "tcp", "decode", "/x", date(2026, 1, 1)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def table_of(name: str, **more: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Mostly the right keys with any values."""
    (table,) = (table for table in TABLES if table.name == name)
    return st.fixed_dictionaries({}, optional={key.name: values for key in table.keys} | more)


nics = values | st.lists(table_of("fabric.nics"), max_size=3)
shapes = {table.name: table_of(table.name) for table in TABLES if "." not in table.name}
shapes["fabric"] = table_of("fabric", nics=nics)
shapes["prefill"] = st.lists(table_of("prefill"), max_size=3)
tables = st.fixed_dictionaries(
    {}, optional={name: shape | values for name, shape in shapes.items()}
)


@given(raw=tables, version=values)
@settings(deadline=None, max_examples=100)
def test_nothing_that_is_decoded_makes_it_raise(raw: dict[str, object], version: object) -> None:
    for given_version in (1, version):
        found = parse({"config_version": given_version, **raw})
        if isinstance(found, list):
            assert found
            assert all(problem.where and problem.text for problem in found)
            assert all(len(str(problem)) < 2000 for problem in found)
