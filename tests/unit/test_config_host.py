"""What the host has to have: NICs, addresses, free ports, locked memory."""

import dataclasses
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode import confighost
from pdnode.config import (
    ApiConfig,
    Config,
    FabricConfig,
    KvConfig,
    ModelConfig,
    NicConfig,
    NodeConfig,
    PeerConfig,
    PrefillConfig,
)
from pdnode.confighost import check_host, resolve_nics
from pdnode.confignics import entries_problem, memlock_problem
from pdnode.errors import ConfigError, DeviceMissing, Problem
from pdnode.topology.sysfs import Sysfs
from pdnode.types import Role


def nic(name: str, address: str = "", listen: str = "", advertise: str = "") -> NicConfig:
    return NicConfig(name, address, listen, advertise)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        node=NodeConfig(id="n", role=Role.PREFILL, admin_socket=tmp_path / "admin.sock"),
        model=ModelConfig(path=tmp_path, name="m"),
        api=ApiConfig(port=0),
        peer=PeerConfig(port=0),
        fabric=FabricConfig(port=0, nics=(nic("lo", "127.0.0.1", "127.0.0.1", "127.0.0.1"),)),
    )


def with_nics(config: Config, *nics: NicConfig, provider: str = "tcp") -> Config:
    fabric = dataclasses.replace(config.fabric, nics=nics, provider=provider)
    return dataclasses.replace(config, fabric=fabric)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def test_interface_name_becomes_its_address(config: Config) -> None:
    assert resolve_nics(with_nics(config, nic("lo"))).fabric.nics == (
        nic("lo", "127.0.0.1", "127.0.0.1", "127.0.0.1"),
    )
    assert resolve_nics(with_nics(config, nic("lo", listen="0.0.0.0"))).fabric.nics == (
        nic("lo", "127.0.0.1", "0.0.0.0", "127.0.0.1"),
    )


def test_rdma_device_has_the_address_of_its_interface(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx5_0" / "device" / "net" / "lo").mkdir(parents=True)
    monkeypatch.setattr(confighost, "_RDMA_DEVICES", tmp_path)
    resolved = resolve_nics(with_nics(config, nic("mlx5_0"), provider="verbs"))
    assert resolved.fabric.nics[0].address == "127.0.0.1"


def test_efa_device_needs_no_address(config: Config) -> None:
    unchanged = with_nics(config, nic("rdmap0s6"), provider="efa")
    assert resolve_nics(unchanged) == unchanged


def test_nics_that_are_not_here_are_all_named(config: Config) -> None:
    absent = with_nics(config, nic("nope0"), nic("lo"), nic("nope1"))
    with pytest.raises(DeviceMissing) as caught:
        resolve_nics(absent)
    lines = str(caught.value).splitlines()
    assert [line.split(";")[0] for line in lines] == [
        'fabric.nics[0].name: no address found for "nope0"',
        'fabric.nics[2].name: no address found for "nope1"',
    ]
    assert " lo" in lines[0]  # the interfaces that there are
    assert [problem.device for problem in check_host(absent)] == [True, True]


def test_addresses_that_were_looked_up_keep_the_rules(config: Config) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_nics(with_nics(config, nic("lo"), nic("other", "127.0.0.1")))
    assert [problem.where for problem in caught.value.problems] == [
        "fabric.nics[0].address",
        "fabric.nics[1].address",
    ]
    remote = dataclasses.replace(config, peer=PeerConfig(host="0.0.0.0", port=0))
    with pytest.raises(ConfigError, match=r"is loopback, but peer\.listen serves other hosts"):
        resolve_nics(with_nics(remote, nic("lo")))


def test_free_host_has_no_problem(config: Config) -> None:
    assert check_host(config) == []


@pytest.mark.parametrize("key", ["api.listen", "peer.listen", "fabric.port"])
def test_taken_ports(config: Config, taken: int, key: str) -> None:
    if key == "api.listen":
        config = dataclasses.replace(config, api=ApiConfig(port=taken))
    elif key == "peer.listen":
        config = dataclasses.replace(config, peer=PeerConfig(port=taken))
    else:
        fabric = dataclasses.replace(config.fabric, port=taken)
        config = dataclasses.replace(config, fabric=fabric)
    assert check_host(config) == [Problem(key, f"port {taken} on 127.0.0.1 is taken")]


def test_only_a_prefill_node_binds_the_peer_port(config: Config, taken: int) -> None:
    node = dataclasses.replace(config.node, role=Role.DECODE)
    decode = dataclasses.replace(config, node=node, peer=PeerConfig(port=taken))
    assert check_host(with_nics(decode, nic("lo", "127.0.0.1"))) == []


def test_addresses_of_other_hosts(config: Config) -> None:
    config = dataclasses.replace(config, api=ApiConfig(host="198.51.100.1", port=0))
    config = with_nics(config, nic("a", "203.0.113.2", "127.0.0.1", "127.0.0.1"))
    assert [str(problem) for problem in check_host(config)] == [
        "api.listen: 198.51.100.1 is no address of this host",
        "fabric.nics[0].address: 203.0.113.2 is no address of this host",
    ]


@pytest.mark.parametrize(
    ("provider", "pool_bytes", "limit", "found"),
    [
        ("tcp", 1 << 30, 8 << 20, None),
        ("verbs", 1 << 30, resource.RLIM_INFINITY, None),
        ("verbs", 1 << 30, 2 << 30, None),
        ("verbs", 1 << 30, 8 << 20, "limited to 8MiB, 1GiB is needed"),
        ("efa", 0, 2 << 30, "limited to 2GiB, unlimited (kv.pool_bytes is auto) is needed"),
    ],
)
def test_locked_memory(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
    pool_bytes: int,
    limit: int,
    found: str | None,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    config = dataclasses.replace(config, kv=KvConfig(pool_bytes=pool_bytes))
    problem = memlock_problem(with_nics(config, *config.fabric.nics, provider=provider))
    if found is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.device
        assert found in problem.text


@pytest.mark.parametrize(
    ("region", "peers", "found"),
    [
        ("auto", 2, ""),
        ("auto", 3, "26214402 pages of 4096 bytes would be registered with each NIC (3 peers), "),
        ("cumem", 40, ""),
    ],
)
def test_table_entries_of_an_efa_device(
    config: Config, region: str, peers: int, found: str
) -> None:
    """95 GB in pages of 4 KiB is the most."""
    prefill = tuple(PrefillConfig(f"p{number}", "127.0.0.1", 7700) for number in range(peers))
    node = dataclasses.replace(config.node, role=Role.DECODE)
    kv = KvConfig(pool_bytes=(100 << 30) // 3 + 1, region=region)
    config = dataclasses.replace(config, node=node, kv=kv, prefill=prefill)
    config = with_nics(config, *config.fabric.nics, provider="efa")
    problem = entries_problem(config, Sysfs(Path("/nowhere")))
    assert ("" if problem is None else problem.text)[: len(found) or None] == found


def test_memory_of_a_gpu_is_not_locked(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    config = with_nics(config, *config.fabric.nics, provider="verbs")
    kv = KvConfig(pool_bytes=1 << 30, region="cumem")
    assert memlock_problem(dataclasses.replace(config, kv=kv)) is None
    engine = dataclasses.replace(config.engine, dp=2)
    staged = dataclasses.replace(config, engine=engine, kv=dataclasses.replace(kv, region="staged"))
    problem = memlock_problem(staged)
    assert problem is not None
    assert "2GiB (1GiB × 2 groups) is needed" in problem.text


def test_library_that_is_not_there(config: Config) -> None:
    fabric = dataclasses.replace(config.fabric, library="/nowhere/libfabric.so.1")
    (problem,) = check_host(dataclasses.replace(config, fabric=fabric))
    assert problem == Problem(
        "fabric.library", "there is no file /nowhere/libfabric.so.1", device=True
    )


def test_provider_that_this_host_has_not(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by name, never replaced by tcp."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    problem, nic_problem = check_host(with_nics(config, *config.fabric.nics, provider="efa"))
    assert nic_problem.text.startswith('"lo" is no RDMA device of this host')
    assert (problem.where, problem.device) == ("fabric.provider", True)
    assert problem.text.startswith("provider 'efa' is not available in ")


def test_a_colocated_node_needs_no_libfabric(config: Config) -> None:
    node = dataclasses.replace(config.node, role=Role.COLOCATED)
    fabric = FabricConfig(library="/nowhere/libfabric.so.1")
    assert check_host(dataclasses.replace(config, node=node, fabric=fabric)) == []
