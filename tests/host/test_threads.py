"""CPUs for threads: physical cores, nodes, the process's own limits, and the worker that obeys."""

import dataclasses
from pathlib import Path

import pytest

from pdnode.config import Config, ModelConfig, NodeConfig, TopologyConfig
from pdnode.daemon.placement import NOT_PLACED, choose_places
from pdnode.topology.cpus import NumaNode, guess_cores, read_cores, read_nodes, read_online
from pdnode.topology.detect import detect
from pdnode.topology.groups import nearest_groups
from pdnode.topology.sysfs import Sysfs
from pdnode.topology.threads import (
    GroupThreads,
    Threads,
    allowed_cpus,
    place_group_threads,
    place_host_threads,
    place_threads,
)
from pdnode.types import Role
from tests.support.host_tree import GPU, MELLANOX, HostTree


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    """Two nodes of four cores of two threads, numbered as Linux does on x86."""
    tree = HostTree(tmp_path)
    tree.node(0, "0-3,8-11")
    tree.node(1, "4-7,12-15")
    return tree


def cores(tree: HostTree) -> list[set[int]]:
    sysfs = Sysfs(tree.root)
    nodes = read_nodes(sysfs)
    return [set(core) for core in read_cores(sysfs, read_online(sysfs, nodes), nodes)]


def test_siblings_as_the_kernel_says_and_as_they_are_guessed(tree: HostTree) -> None:
    guessed = [{number, number + 8} for number in range(8)]
    assert cores(tree) == guessed
    tree.cores([f"{2 * number},{2 * number + 1}" for number in range(8)])
    assert cores(tree) == [{2 * number, 2 * number + 1} for number in range(8)]


def test_a_node_of_one_run_has_a_core_per_cpu() -> None:
    node = NumaNode(0, frozenset(range(4)))
    assert guess_cores(node.cpus, (node,)) == tuple(frozenset({cpu}) for cpu in range(4))


def test_gpus_of_a_node_divide_its_cores(tree: HostTree) -> None:
    for number, numa in enumerate((0, 0, 1)):
        tree.pci(f"1{number}:00.0", GPU, numa=numa)
    assert place_threads(detect(tree.root)) == [
        Threads(0, (1,)), Threads(2, (3,)), Threads(4, (5, 6, 7)),
    ]  # fmt: skip


def test_too_many_gpus_share_cores_and_say_so(tree: HostTree) -> None:
    for number in range(3):
        tree.pci(f"1{number}:00.0", GPU, numa=0)
    found = place_threads(detect(tree.root))
    assert [threads.problem for threads in found[:2]] == ["", ""]
    assert "threads share cores" in found[2].problem
    assert found[2].progress in (0, 1, 2, 3)  # still on its node


def test_only_cpus_that_this_process_may_use(tree: HostTree) -> None:
    tree.pci("10:00.0", GPU, numa=0)
    host = detect(tree.root)
    assert place_threads(host, frozenset({2, 9, 10, 15})) == [Threads(9, (2,))]


def test_a_node_without_gpu_sits_with_its_nics(tree: HostTree) -> None:
    tree.rdma("mlx5_0", tree.pci("1a:00.0", MELLANOX, numa=1))
    host = detect(tree.root)
    everything = frozenset(range(16))
    assert place_host_threads(host, host.nics, everything) == Threads(4, (5, 6, 7))
    assert place_host_threads(host, (), everything) == Threads(0, tuple(range(1, 8)))
    one = place_host_threads(host, host.nics, frozenset({0, 8}))
    assert (one.progress, one.worker) == (0, (0,))
    assert one.problem == "fewer than two physical cores"


def test_a_node_pins_only_where_it_is_asked_to() -> None:
    """On this host, whatever it is."""
    config = Config(NodeConfig("n", Role.COLOCATED), ModelConfig(Path("/m"), "m"))
    assert choose_places(config) == NOT_PLACED
    pinned = choose_places(dataclasses.replace(config, topology=TopologyConfig(pin=True)))
    assert {*pinned.progress, *pinned.worker} <= allowed_cpus()
    assert len(pinned.progress) == 1
    assert pinned.worker


def test_device_groups_have_a_thread_each_near_to_their_nics(tree: HostTree) -> None:
    for number, numa in enumerate((0, 1, 1)):
        root = f"pci0000:{number}0"
        tree.rdma(f"mlx5_{number}", tree.pci(f"{number}1:00.0", MELLANOX, root=root, numa=numa))
    host = detect(tree.root)
    groups = [[nic] for nic in host.nics]
    everything = frozenset(range(16))
    found = place_group_threads(host, groups, everything)
    assert found == GroupThreads((0, 4, 5), (1, 2, 3, 6, 7))
    few = place_group_threads(host, groups, frozenset({0, 1, 8, 9}))
    assert few.progress == (0, 1, 0)  # two cores, so the last thread shares one
    assert few.problem == "fewer physical cores than device groups and a worker"
    assert place_group_threads(host, groups, frozenset()).progress == (-1, -1, -1)
    # The nearest group stands in; equally near ones in turn.
    assert nearest_groups(groups) == ((0, 1, 2), (1, 2, 0), (2, 1, 0))
    assert nearest_groups([[], [], []]) == ((0, 1, 2), (1, 2, 0), (2, 0, 1))
