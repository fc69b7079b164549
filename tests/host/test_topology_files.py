"""Topology files: what is refused, and what they change over a sysfs tree."""

from pathlib import Path

import pytest

from pdnode.errors import ConfigError
from pdnode.topology import drivers
from pdnode.topology.detect import detect
from pdnode.topology.drivers import driver_gpus
from pdnode.topology.host import Host
from pdnode.topology.ncclxml import override, read_topology_file
from pdnode.topology.place import place
from pdnode.topology.usable import Policy
from tests.support.host_tree import GPU, MELLANOX, HostTree
from tests.support.topology_data import OWN


def nested(depth: int) -> str:
    inside = "".join(f'<pci busid="0000:{n:02x}:00.0" class="0x060400">' for n in range(depth))
    return f'<system><cpu numaid="0">{inside}{"</pci>" * depth}</cpu></system>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no XML"),
        ("<topology/>", "expected <system> as NCCL writes it, got <topology>"),
        ('<system><cpu numaid="x"/></system>', 'cpu numaid="x" is no number'),
        ('<system><cpu numaid="0" affinity="fffffffff,0"/></system>', "affinity of cpu 0"),
        ('<system><cpu><pci busid="1:2"/></cpu></system>', 'busid="1:2" is no PCI address'),
        (nested(80), "deeper than 64 bridges"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "topology.xml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_topology_file(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_topology_file(tmp_path / "none.xml")
    (tmp_path / "large.xml").write_bytes(b" " * (4 << 20) + b"<system/>")
    with pytest.raises(ConfigError, match="larger than"):
        read_topology_file(tmp_path / "large.xml")


def azure(tmp_path: Path) -> Host:
    """An NDv5 guest: every device alone in its PCI domain, and no node for any."""
    tree = HostTree(tmp_path)
    tree.node(0, "0-47")
    tree.node(1, "48-95")
    for number in (1, 2, 3, 8, 9, 0xA, 0xB, 0xC):
        tree.pci(f"{number:04x}:00:00.0", GPU, root=f"pci{number:04x}:00", numa=-1)
    for number in range(1, 9):
        domain = f"{0x100 + number:04x}"
        device = tree.pci(f"{domain}:00:00.0", MELLANOX, root=f"pci{domain}:00", numa=-1)
        tree.rdma(f"mlx5_{number}", device)
    return detect(tree.root)


def test_azure_needs_its_file(tmp_path: Path) -> None:
    host = azure(tmp_path)
    assert {rail.distance.name for at in place(host, Policy()).gpus for rail in at.rails} == {"SYS"}
    merged = override(host, read_topology_file(OWN / "nccl_xml" / "azure-ndv5.xml"))
    assert merged.problems == ()
    placement = place(merged, Policy())
    pairs = {at.gpu.place.pci: [nic.name for nic in at.nics] for at in placement.gpus}
    assert pairs == {
        "0001:00:00.0": ["mlx5_1"], "0002:00:00.0": ["mlx5_2"], "0003:00:00.0": ["mlx5_3"],
        "0008:00:00.0": ["mlx5_4"], "0009:00:00.0": ["mlx5_5"], "000a:00:00.0": ["mlx5_6"],
        "000b:00:00.0": ["mlx5_7"], "000c:00:00.0": ["mlx5_8"],
    }  # fmt: skip
    assert [at.gpu.place.numa for at in placement.gpus] == [0] * 4 + [1] * 4
    assert placement.gpus[0].nics[0].rate_gbps == 400.0  # as sysfs says


def test_devices_that_are_not_here_are_named(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.pci("0001:00:00.0", GPU, root="pci0001:00", numa=1)
    merged = override(detect(tree.root), read_topology_file(OWN / "nccl_xml" / "azure-ndv2.xml"))
    assert "NIC 0101:00:00.0 of the topology file is not on this machine" in merged.problems
    assert "GPU 0008:00:00.0 of the topology file is not on this machine" in merged.problems
    assert "0001:00:00.0: node 0 in the topology file, 1 in sysfs; the file is believed" in (
        merged.problems
    )
    assert merged.gpus[0].place.numa == 0


def test_no_gpu_in_common_is_another_machine(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.pci("0042:00:00.0", GPU, root="pci0042:00", numa=1)
    host = detect(tree.root)
    merged = override(host, read_topology_file(OWN / "nccl_xml" / "azure-ndv2.xml"))
    assert merged.gpus == host.gpus
    assert merged.problems[0].endswith("is not used: none of its GPUs is here")


# GPUs that the driver lists


def test_gpus_of_the_driver_under_proc(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.pci("19:00.0", ("0x030000", "0x10de"))
    for address in ("0000:19:00.0", "0000:1a:00.0"):
        information = tmp_path / "proc/driver/nvidia/gpus" / address / "information"
        information.parent.mkdir(parents=True)
        information.write_text("Model: \t\t NVIDIA H200\nDevice Minor: 0\n")
    host = detect(tree.root)
    assert [(gpu.place.pci, gpu.model) for gpu in host.gpus] == [
        ("0000:19:00.0", "NVIDIA H200"), ("0000:1a:00.0", "NVIDIA H200"),
    ]  # fmt: skip
    assert host.problems == ("GPU 0000:1a:00.0: the driver has it, sysfs does not show it",)


class FakeDriver:
    """As much of cuda.bindings.driver as is used: tuples of a result code and a value."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def cuInit(self, flags: int) -> tuple[int]:
        assert flags == 0
        return (self.code,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return (0, 1)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return (0, ordinal)

    def cuDeviceGetPCIBusId(self, size: int, device: int) -> tuple[int, bytes]:
        return (0, b"00000000:4F:00.0\0\0\0")

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:
        return (0, b"NVIDIA H200\0")


def test_gpus_of_the_driver_by_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(drivers.importlib, "import_module", lambda _: fake)
    assert driver_gpus() == {"0000:4f:00.0": "NVIDIA H200"}
    fake.code = 100  # CUDA_ERROR_NO_DEVICE
    assert driver_gpus() == {}


def test_without_cuda_python_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(drivers.importlib, "import_module", absent)
    assert driver_gpus() == {}
