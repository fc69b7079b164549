"""What check-config --host says of NICs, over trees made of a few files."""

import dataclasses
import resource
from pathlib import Path

import pytest

from pdnode.config import (
    Config,
    FabricConfig,
    KvConfig,
    ModelConfig,
    NicConfig,
    NodeConfig,
    PrefillConfig,
    TopologyConfig,
)
from pdnode.confignics import memlock_problem, nic_problems, nic_warnings
from pdnode.topology.detect import detect
from pdnode.topology.sysfs import Sysfs
from pdnode.types import Role
from tests.support.host_tree import MELLANOX, HostTree


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


def config(*names: str, provider: str = "verbs") -> Config:
    nics = tuple(NicConfig(name, "192.0.2.1", "", "") for name in names)
    return Config(
        node=NodeConfig(id="n", role=Role.DECODE),
        model=ModelConfig(path=Path("/m"), name="m"),
        fabric=FabricConfig(provider=provider, nics=nics),
    )


def problems(tree: HostTree, config: Config) -> list[str]:
    return [str(p) for p in nic_problems(config, detect(tree.root), Sysfs(tree.root))]


def warnings(tree: HostTree, config: Config) -> list[str]:
    return [str(p) for p in nic_warnings(config, detect(tree.root), Sysfs(tree.root))]


def roce(tree: HostTree, name: str, address: str, *, mtu: str, rate: str = "100 Gb/sec") -> Path:
    device = tree.pci(address, MELLANOX)
    tree.rdma(name, device, layer="Ethernet", rate=rate)
    tree.net(f"eth-{name}", device)
    tree.write(device / "net" / f"eth-{name}" / "mtu", mtu)
    return device / "infiniband" / name / "ports" / "1"


def test_a_port_that_is_down_and_a_device_that_is_not_there(tree: HostTree) -> None:
    tree.rdma("mlx5_0", tree.pci("1a:00.0", MELLANOX), state="1: DOWN")
    assert problems(tree, config("mlx5_0", "mlx5_9")) == [
        "fabric.nics[0].name: the port of mlx5_0 is DOWN",
        'fabric.nics[1].name: "mlx5_9" is no RDMA device of this host; it has: mlx5_0',
    ]
    assert problems(tree, config("mlx5_0", provider="efa")) == [
        "fabric.nics[0].name: mlx5_0 is driven by verbs, not by efa",
        "fabric.nics[0].name: the port of mlx5_0 is DOWN",
    ]


def test_roce_needs_a_gid_of_version_2(tree: HostTree) -> None:
    port = roce(tree, "mlx5_0", "1a:00.0", mtu="9000")
    assert problems(tree, config("mlx5_0")) == []  # a kernel that shows no types
    tree.write(port / "gid_attrs/types/0", "IB/RoCE v1")
    tree.write(port / "gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001")
    tree.write(port / "gid_attrs/types/1", "RoCE v2")
    tree.write(port / "gids/1", "0000:0000:0000:0000:0000:0000:0000:0000")
    assert problems(tree, config("mlx5_0")) == [
        "fabric.nics[0].name: mlx5_0 has no RoCE v2 GID: give its interface an address"
    ]
    tree.write(port / "gids/1", "0000:0000:0000:0000:0000:ffff:c000:0201")
    assert problems(tree, config("eth-mlx5_0")) == []


def test_a_nic_that_is_both_named_and_denied(tree: HostTree) -> None:
    tree.rdma("mlx5_0", tree.pci("1a:00.0", MELLANOX))
    both = dataclasses.replace(config("mlx5_0"), topology=TopologyConfig(deny=("mlx5_*",)))
    assert problems(tree, both) == ["fabric.nics[0].name: mlx5_0 is denied by topology.deny"]


def test_an_interface_that_is_down(tree: HostTree) -> None:
    tree.net("eth0", tree.pci("1a:00.0", MELLANOX), state="down")
    assert problems(tree, config("eth0", provider="tcp")) == [
        "fabric.nics[0].name: interface eth0 is down"
    ]
    assert problems(tree, config("lo", provider="tcp")) == []


def test_what_costs_speed_is_a_warning(tree: HostTree) -> None:
    roce(tree, "mlx5_0", "1a:00.0", mtu="1500")
    roce(tree, "mlx5_1", "1b:00.0", mtu="9000", rate="400 Gb/sec")
    tree.write("devices/pci0000:00/0000:1b:00.0/current_link_speed", "16.0 GT/s PCIe")
    tree.write("devices/pci0000:00/0000:1b:00.0/current_link_width", "16")
    tree.write("kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0")
    assert warnings(tree, config("mlx5_0", "mlx5_1")) == [
        "fabric.nics[0].name: MTU of eth-mlx5_0 is 1500; RoCE wants 4200 or more on every hop",
        "fabric.nics[1].name: the PCIe slot of mlx5_1 carries 252.1 Gb/s, its port 400",
        "fabric.nics: NICs of unequal rates share the work: mlx5_0 100 Gb/s, mlx5_1 252.1 Gb/s",
        "kv.pool_bytes: no huge pages are reserved; a NIC then needs an entry for every 4 KiB",
    ]
    tree.write("kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512")
    assert [text for text in warnings(tree, config("mlx5_1")) if "huge" in text] == []


def test_locked_memory_is_needed_per_nic_and_per_peer_of_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5 << 30, 5 << 30))
    peers = tuple(PrefillConfig(f"p{number}", "h", 7700 + number) for number in range(3))
    many = dataclasses.replace(
        config("a", "b", provider="efa"), kv=KvConfig(pool_bytes=1 << 30), prefill=peers
    )
    problem = memlock_problem(many)
    assert problem is not None
    assert "6GiB (1GiB × 2 NICs × 3 peers) is needed" in problem.text
    assert "device group" not in problem.text
    split = tuple(
        dataclasses.replace(nic, group=number) for number, nic in enumerate(many.fabric.nics)
    )
    lending = dataclasses.replace(many, fabric=dataclasses.replace(many.fabric, nics=split))
    problem = memlock_problem(lending)
    assert problem is not None
    assert (
        "6GiB (1GiB × 2 NICs × 3 peers) at worst, when NICs carry the memory of other device "
        "groups, is needed" in problem.text
    )
    verbs = dataclasses.replace(many, fabric=dataclasses.replace(many.fabric, provider="verbs"))
    assert memlock_problem(verbs) is None
