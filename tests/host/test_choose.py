"""Which NICs a node takes by itself."""

from pathlib import Path

import pytest

from pdnode.topology.choose import Choice, FabricDevice, choose, default_route
from pdnode.topology.detect import detect
from pdnode.topology.sysfs import Sysfs
from pdnode.topology.usable import Policy
from tests.support.host_tree import GPU, MELLANOX, HostTree

INTEL = ("0x020000", "0x8086")


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    """Two GPUs with an RDMA NIC each behind a switch of their own, and a management port."""
    tree = HostTree(tmp_path)
    tree.node(0, "0-3")
    tree.cores(str(cpu) for cpu in range(4))
    for number, bus in enumerate(("1", "2")):
        under = (f"{bus}0:00.0",)
        tree.pci(f"{bus}a:00.0", GPU, under=under, numa=0)
        nic = tree.pci(f"{bus}b:00.0", MELLANOX, under=under, numa=0)
        tree.rdma(f"mlx5_{number}", nic, layer="Ethernet")
        tree.net(f"eth{number}", nic, speed="400000")
    tree.net("eno1", tree.pci("30:00.0", INTEL, numa=0), speed="1000")
    return tree


def pick(
    tree: HostTree,
    provider: str,
    *devices: FabricDevice,
    gpus: tuple[str, ...] = (),
    bare: str = "-",
) -> Choice:
    """Every NIC has an address but `bare`."""
    return choose(
        detect(tree.root),
        Policy(provider=provider),
        devices,
        gpus=gpus,
        address_of=lambda name: None if name == bare else "192.0.2.1",
        default_route="wlan0",
    )


def names(choice: Choice) -> list[str]:
    return [one.nic.name for one in choice.chosen]


def against(choice: Choice, name: str) -> str:
    (reason,) = (one.reason for one in choice.refused if one.nic.name == name)
    return reason


LISTED = (
    FabricDevice("mlx5_0", "0000:1b:00.0", "up", 400.0),
    FabricDevice("mlx5_1", "0000:2b:00.0", "up", 400.0),
)


def test_the_nics_near_to_the_gpus_are_taken_with_their_reason(tree: HostTree) -> None:
    choice = pick(tree, "verbs", *LISTED, gpus=("0000:1a:00.0", "0000:2a:00.0"))
    assert names(choice) == ["mlx5_0", "mlx5_1"]
    assert (
        choice.chosen[0].reason
        == "GPU 0000:1a:00.0: PIX: nearest, 400 Gb/s; device group 0, for rank 0"
    )
    assert against(choice, "eno1") == "a network interface; the fabric here is verbs"


def test_without_gpus_all_that_are_of_use(tree: HostTree) -> None:
    choice = pick(tree, "verbs", *LISTED)
    assert names(choice) == ["mlx5_0", "mlx5_1"]
    assert choice.chosen[0].reason == "verbs, port is ACTIVE, 400 Gb/s"


def test_libfabric_is_asked_by_pci_address_not_by_name(tree: HostTree) -> None:
    renamed = FabricDevice("rocep27s0", "0000:1b:00.0", "up")
    down = FabricDevice("mlx5_1", "0000:2b:00.0", "down")
    choice = pick(tree, "verbs", renamed, down)
    assert names(choice) == ["mlx5_0"]
    assert against(choice, "mlx5_1") == "libfabric says that its link is down"
    assert against(pick(tree, "verbs", renamed), "mlx5_1") == "libfabric's verbs does not list it"


def test_tcp_takes_interfaces_with_an_address_and_no_management_port(tree: HostTree) -> None:
    """The interface of an RDMA device stands for it under the device's name."""
    choice = pick(tree, "tcp", bare="mlx5_1")
    assert names(choice) == ["mlx5_0"]
    assert against(choice, "mlx5_1") == "it has no IP address"
    assert "management port" in against(choice, "eno1")


def test_a_host_without_network_hardware_takes_what_has_the_default_route(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    choice = pick(tree, "tcp")
    assert names(choice) == ["wlan0"]
    assert choice.chosen[0].reason.endswith("it has the default route")
    assert names(pick(tree, "tcp", bare="wlan0")) == []
    assert names(pick(tree, "verbs")) == [], "RDMA falls back to nothing"


def test_the_default_route_is_read_from_proc(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    assert default_route(Sysfs(tree.root)) == ""
    table = tmp_path / "proc" / "net" / "route"
    table.parent.mkdir(parents=True)
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    table.write_text(
        head + "eth1 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"
        "eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0\n"
    )
    assert default_route(Sysfs(tree.root)) == "eth0"


@pytest.fixture
def switches(tmp_path: Path) -> HostTree:
    """Three switches: with two GPUs and a NIC, with a GPU and two NICs, with a NIC alone."""
    tree = HostTree(tmp_path)
    tree.node(0, "0-3")
    for bus, gpus, nics in (("1", 2, 1), ("2", 1, 2), ("4", 0, 1)):
        under = (f"{bus}0:00.0",)
        for number in range(gpus):
            tree.pci(f"{bus}{number + 1}:00.0", GPU, under=under, numa=0)
        for number in range(nics):
            nic = tree.pci(f"{bus}{number + 8}:00.0", MELLANOX, under=under, numa=0)
            tree.rdma(f"mlx5_{bus}{number}", nic)
            tree.net(f"eth{bus}{number}", nic)
    return tree


def grouped(tree: HostTree, *buses: str, bare: str = "-") -> tuple[tuple[int, ...], dict[str, int]]:
    """Groups of the ranks on the GPUs of these buses, and of the NICs."""
    found = pick(tree, "tcp", gpus=tuple(f"0000:{bus}:00.0" for bus in buses), bare=bare)
    return found.homes, {one.nic.name: one.group for one in found.chosen}


def test_ranks_and_the_nics_of_their_gpus_form_groups(switches: HostTree) -> None:
    """Three ranks on two groups, in either order: nothing that a rule of their numbers gives."""
    assert grouped(switches, "11", "12", "21") == (
        (0, 0, 1), {"mlx5_10": 0, "mlx5_20": 1, "mlx5_21": 1},
    )  # fmt: skip
    assert grouped(switches, "21", "12", "11") == (
        (0, 1, 1), {"mlx5_10": 1, "mlx5_20": 0, "mlx5_21": 0},
    )  # fmt: skip
    assert grouped(switches, "11", "21", "12") == (
        (0, 1, 0), {"mlx5_10": 0, "mlx5_20": 1, "mlx5_21": 1},
    )  # fmt: skip


def test_what_no_rank_of_the_node_is_near_to_is_left(switches: HostTree) -> None:
    found = pick(switches, "tcp", gpus=("0000:11:00.0",))
    assert names(found) == ["mlx5_10"]
    assert against(found, "mlx5_20") == "it is for GPU 0000:21:00.0, which no rank runs on"
    assert against(found, "mlx5_40") == "no GPU's nearest"


def test_a_nic_that_cannot_be_used_is_dealt_to_nobody(switches: HostTree) -> None:
    """Its GPU's ranks are with a NIC that is as near as any."""
    homes, nics = grouped(switches, "11", "21", bare="mlx5_10")
    assert "mlx5_10" not in nics
    assert homes[0] in nics.values()
    assert nics["mlx5_20"] == homes[1]


def test_gpus_that_the_host_does_not_show_leave_one_group(switches: HostTree) -> None:
    everything = dict.fromkeys(("mlx5_10", "mlx5_20", "mlx5_21", "mlx5_40"), 0)
    assert grouped(switches, "77", "78") == ((), everything)
    assert grouped(switches) == ((), everything), "the engine runs on the CPU"
    homes, nics = grouped(switches, "77", "11", "21")
    assert homes[1:] == (nics["mlx5_10"], nics["mlx5_20"])
    assert homes[0] in homes[1:], "it joins one that has NICs"
