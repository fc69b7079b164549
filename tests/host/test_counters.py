"""Counters of NICs: units, names of each maker, and what is not available."""

import tarfile
from pathlib import Path

import pytest

from pdnode.topology.counters import NicCounters, Traffic
from pdnode.topology.detect import detect
from pdnode.topology.sysfs import Sysfs
from tests.support.host_tree import EFA, MELLANOX, HostTree
from tests.support.topology_data import collection


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


def counters(tree: HostTree, clock: Clock) -> NicCounters:
    return NicCounters(detect(tree.root).nics, sysfs=Sysfs(tree.root), clock=clock)


def port(name: str, file: str, number: int = 1) -> str:
    return f"class/infiniband/{name}/ports/{number}/{file}"


def test_infiniband_data_is_in_units_of_four_octets(tree: HostTree) -> None:
    tree.rdma("mlx5_0", tree.pci("1a:00.0", MELLANOX))
    for file, text in (
        ("counters/port_xmit_data", "1000"),
        ("counters/port_rcv_data", "250"),
        ("counters/port_xmit_wait", "7"),
        ("counters/link_downed", "0"),
        ("hw_counters/local_ack_timeout_err", "2"),
        ("hw_counters/packet_seq_err", "3"),
    ):
        tree.write(port("mlx5_0", file), text)
    assert counters(tree, Clock()).read("mlx5_0") == Traffic(
        sent_bytes=4000, received_bytes=1000, retransmits=5, congestion=7, link_downs=0
    )


def test_efa_counts_bytes_itself(tree: HostTree) -> None:
    tree.rdma("rdmap79s0", tree.pci("4f:00.0", EFA))
    for file in ("tx_bytes", "rx_bytes", "tx_pkts", "rx_pkts", "rx_drops"):
        tree.write(port("rdmap79s0", f"hw_counters/{file}"), "12345")
    assert counters(tree, Clock()).read("rdmap79s0") == Traffic(
        sent_bytes=12345, received_bytes=12345, sent_packets=12345, received_packets=12345,
        drops=12345,
    )  # fmt: skip


def test_what_a_driver_does_not_give_is_none_and_not_zero(tree: HostTree) -> None:
    tree.rdma("i40iw0", tree.pci("1a:00.0", ("0x020000", "0x8086")))
    tree.write(port("i40iw0", "counters/port_xmit_data"), "N/A (no PMA)")
    tree.write(port("i40iw0", "counters/port_rcv_data"), "4294967295")  # stuck at its end
    tree.write(port("i40iw0", "hw_counters/ip4OutOctets"), "100")
    tree.write(port("i40iw0", "hw_counters/ip6OutOctets"), "20")
    assert counters(tree, Clock()).read("i40iw0") == Traffic(sent_bytes=120)


def test_ports_of_one_device_are_added_up(tree: HostTree) -> None:
    tree.rdma("mlx4_0", tree.pci("1a:00.0", MELLANOX), ports=2)
    for number, text in ((1, "10"), (2, "5")):
        tree.write(port("mlx4_0", "counters/port_xmit_data", number), text)
    tree.write(port("mlx4_0", "counters/port_rcv_data", 1), "10")  # the other port gives none
    assert counters(tree, Clock()).read("mlx4_0") == Traffic(sent_bytes=60)


def test_net_devices(tree: HostTree) -> None:
    tree.net("eth0", tree.pci("1a:00.0", MELLANOX))
    for file in ("tx_bytes", "rx_bytes", "tx_dropped", "rx_dropped"):
        tree.write(f"class/net/eth0/statistics/{file}", "9")
    read = counters(tree, Clock()).read("eth0")
    assert read == Traffic(sent_bytes=9, received_bytes=9, drops=18)


def test_no_faster_than_the_lifespan(tree: HostTree) -> None:
    tree.rdma("mlx5_0", tree.pci("1a:00.0", MELLANOX))
    tree.write(port("mlx5_0", "hw_counters/lifespan"), "500")
    tree.write(port("mlx5_0", "counters/port_xmit_data"), "1")
    clock = Clock()
    reader = counters(tree, clock)
    assert reader.read("mlx5_0").sent_bytes == 4
    tree.write(port("mlx5_0", "counters/port_xmit_data"), "2")
    clock.now_s += 0.499
    assert reader.read("mlx5_0").sent_bytes == 4
    clock.now_s += 0.001
    assert reader.read("mlx5_0").sent_bytes == 8


H100 = collection() / "sysfs" / "gpud-h100-sys-class-infiniband.tar.gz"


@pytest.mark.skipif(not H100.exists(), reason="the collection is not beside the repository")
def test_ports_of_a_real_h100_host(tmp_path: Path) -> None:
    with tarfile.open(H100) as tar:
        tar.extractall(tmp_path, filter="tar")
    root = tmp_path / "sys"
    (root / "class").mkdir(parents=True)
    next(tmp_path.glob("sys-class-*")).rename(root / "class" / "infiniband")
    host = detect(root)
    rates = {nic.name: (nic.rate_gbps, nic.link_layer) for nic in host.nics}
    assert rates["mlx5_0"] == (400.0, "InfiniBand")
    assert rates["mlx5_bond_0"] == (200.0, "Ethernet")
    raw = int((root / port("mlx5_0", "counters/port_xmit_data")).read_text())
    read = NicCounters(host.nics, sysfs=Sysfs(root)).read("mlx5_0")
    assert read.sent_bytes == raw * 4
    assert read.retransmits is not None
