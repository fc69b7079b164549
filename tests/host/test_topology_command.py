"""`pdnode topology` as a process: the JSON, the tree for people, and its errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdnode.errors import Exit
from tests.support.host_tree import GPU, MELLANOX, HostTree
from tests.support.topology_data import OWN


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdnode", "topology", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def answer(*arguments: str | Path) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.node(0, "0-3")
    tree.node(1, "4-7")
    tree.pci("19:00.0", GPU, under=("15:01.0",), numa=0)
    near = tree.pci("1a:00.0", MELLANOX, under=("15:01.0",), numa=0)
    tree.rdma("mlx5_0", near)
    tree.rdma("mlx5_1", tree.pci("2a:00.0", MELLANOX, root="pci0000:25", numa=1))
    return tree


def test_the_json_of_a_sysfs_tree(tree: HostTree) -> None:
    assert answer("--sysfs", tree.root) == {
        "gpus": [
            {
                "pci": "0000:19:00.0",
                "numa": 0,
                "cpus": "0-3",
                "nics": [
                    {
                        "name": "mlx5_0",
                        "pci": "0000:1a:00.0",
                        "distance": "PIX",
                        "rate_gbps": 400.0,
                        "assigned": True,
                        "reason": "PIX: nearest, 400 Gb/s",
                    },
                    {
                        "name": "mlx5_1",
                        "pci": "0000:2a:00.0",
                        "distance": "SYS",
                        "rate_gbps": 400.0,
                        "assigned": False,
                        "reason": "SYS: farther than the nearest, which is PIX",
                    },
                ],
            }
        ],
        "nics": [
            {
                "name": name,
                "pci": pci,
                "numa": numa,
                "rate_gbps": 400.0,
                "usable": True,
                "reason": "verbs, port is ACTIVE, 400 Gb/s",
            }
            for name, pci, numa in (("mlx5_0", "0000:1a:00.0", 0), ("mlx5_1", "0000:2a:00.0", 1))
        ],
        "problems": [],
    }


def test_the_tree_for_people(tree: HostTree) -> None:
    assert run("--sysfs", tree.root).stdout.splitlines() == [
        "GPU 0000:19:00.0, NUMA node 0, CPUs 0-3",
        "  progress thread on CPU 0, worker on CPUs 1-3",
        "  * mlx5_0 (0000:1a:00.0) PIX: nearest, 400 Gb/s",
        "NICs",
        "  mlx5_0 (0000:1a:00.0, node 0): verbs, port is ACTIVE, 400 Gb/s",
        "  mlx5_1 (0000:2a:00.0, node 1): verbs, port is ACTIVE, 400 Gb/s; of no GPU: SYS: farther "
        "than the nearest, which is PIX",
    ]


def test_a_topology_file_alone_is_the_whole_host() -> None:
    found = answer("--topology-file", OWN / "nccl_xml" / "azure-ndv2.xml")
    assert len(found["gpus"]) == 8
    assert [gpu["numa"] for gpu in found["gpus"]] == [0] * 4 + [1] * 4
    assert all(gpu["nics"][0]["assigned"] for gpu in found["gpus"])


def test_a_file_over_a_tree_of_another_machine_is_a_problem(tree: HostTree) -> None:
    file = OWN / "nccl_xml" / "azure-ndv2.xml"
    (problem,) = answer("--sysfs", tree.root, "--topology-file", file)["problems"]
    assert problem.startswith("the topology file does not describe this machine")


def test_the_configuration_names_provider_and_lists(tree: HostTree, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = tmp_path / "node.toml"
    config.write_text(
        f"config_version = 1\n[node]\nrole = 'colocated'\n[model]\npath = '{tmp_path}'\n"
        "[fabric]\nprovider = 'verbs'\n[topology]\ndeny = ['mlx5_0']\n"
    )
    found = answer("--sysfs", tree.root, "--config", config)
    assert [nic["usable"] for nic in found["nics"]] == [False, True]
    assert found["nics"][0]["reason"] == "denied by topology.deny"


def test_this_host_and_wrong_arguments(tmp_path: Path) -> None:
    assert set(answer()) == {"gpus", "nics", "problems"}
    done = run("--sysfs", tmp_path / "none")
    assert done.returncode == Exit.CONFIG
    assert done.stderr == f"--sysfs: {tmp_path / 'none'} is not a directory\n"
    done = run("--topology-file", tmp_path / "none.xml")
    assert done.returncode == Exit.CONFIG
    assert "No such file" in done.stderr
