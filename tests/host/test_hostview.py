"""What the daemon shows of its host and of its NICs' own counters."""

from pathlib import Path

from pdnode.config import Config, FabricConfig, ModelConfig, NicConfig, NodeConfig
from pdnode.daemon.hostview import HostView
from pdnode.obs.snapshot import Gpu, Numa, Rail
from pdnode.topology.counters import Traffic
from pdnode.types import Role
from tests.support.host_tree import GPU, MELLANOX, HostTree


def config(provider: str, *names: str) -> Config:
    nics = tuple(NicConfig(name, "", "", "") for name in names)
    return Config(
        node=NodeConfig("n", Role.DECODE),
        model=ModelConfig(Path("m"), "m"),
        fabric=FabricConfig(provider=provider, nics=nics),
    )


def host(tmp_path: Path, *, gpu: bool) -> HostTree:
    tree = HostTree(tmp_path)
    tree.node(0, "0-3", "10 20")
    tree.node(1, "4-7", "20 10")
    tree.cores(str(cpu) for cpu in range(8))
    if gpu:
        tree.pci("1a:00.0", GPU, under=("19:00.0",), numa=1)
    device = tree.pci("1b:00.0", MELLANOX, under=("19:00.0",), numa=1)
    tree.rdma("mlx5_0", device, layer="Ethernet")
    tree.net("eth4", device)
    return tree


def test_counters_and_state_of_an_rdma_nic_are_those_of_its_port(tmp_path: Path) -> None:
    tree = host(tmp_path, gpu=True)
    tree.write("class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", "1000")
    view = HostView(config("verbs", "mlx5_0"), root=tree.root)
    (reading,) = view.read().values()
    assert reading.state == "up"
    assert reading.traffic == Traffic(sent_bytes=4000), "what the driver does not give is not 0"
    assert view.numa("mlx5_0") == 1
    tree.write("class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert view.read()["mlx5_0"].state == "down"


def test_over_tcp_the_interface_counts_even_if_it_belongs_to_an_rdma_device(tmp_path: Path) -> None:
    tree = host(tmp_path, gpu=False)
    tree.write("class/net/eth4/statistics/tx_bytes", "77")
    tree.write("class/net/eth4/statistics/rx_bytes", "78")
    view = HostView(config("tcp", "eth4", "lo", "veth0"), root=tree.root)
    readings = view.read()
    assert readings.keys() == {"eth4", "veth0"}, "loopback counts what no NIC carries"
    assert readings["eth4"].traffic == Traffic(sent_bytes=77, received_bytes=78)
    assert readings["eth4"].state == "up"
    assert (readings["veth0"].traffic, readings["veth0"].state) == (Traffic(), "")
    assert view.numa("veth0") is None


def test_the_topology_has_the_rails_of_each_gpu_and_why(tmp_path: Path) -> None:
    topology = HostView(config("verbs", "mlx5_0"), root=host(tmp_path, gpu=True).root).topology
    assert topology.numa == (
        Numa(index=0, cpus="0-3", nics=()),
        Numa(index=1, cpus="4-7", nics=("mlx5_0",)),
    )
    rail = Rail(nic="mlx5_0", distance="PIX", why="PIX: nearest, 400 Gb/s")
    assert topology.gpus == (Gpu(index=0, numa=1, rails=(rail,)),)
    assert topology.rails == ()


def test_without_a_gpu_the_host_memory_has_the_rails(tmp_path: Path) -> None:
    topology = HostView(config("verbs", "mlx5_0"), root=host(tmp_path, gpu=False).root).topology
    assert topology.gpus == ()
    assert topology.rails == (Rail(nic="mlx5_0", why="verbs, port is ACTIVE, 400 Gb/s"),)
