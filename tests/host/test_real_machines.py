"""Real machines against answers that were computed from the same captures by other means."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdnode.topology.counters import NicCounters
from pdnode.topology.cpus import format_cpulist, parse_cpulist
from pdnode.topology.detect import detect
from pdnode.topology.host import Host
from pdnode.topology.ncclxml import override, read_topology_file
from pdnode.topology.place import Placement, place
from pdnode.topology.sysfs import Sysfs
from pdnode.topology.usable import Policy
from tests.support.host_tree import tree_from_hwloc, tree_from_lspci
from tests.support.topology_data import (
    OWN,
    answer_files,
    collection,
    read_answer,
    source_of,
    unpack,
)

pytestmark = pytest.mark.timeout(300)  # thousands of small files on a machine that may be busy


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def check(placement: Placement, answer: dict[str, Any]) -> None:
    """Address, NUMA node, CPUs and the NICs of each class of every GPU."""
    assert len(placement.gpus) == len(answer["answers"])
    found = {at.gpu.place.pci: at for at in placement.gpus}
    for wanted in answer["answers"]:
        at = found[wanted["gpu_bdf"]]
        assert at.gpu.place.numa == wanted["numa"]
        if wanted["local_cpulist"] is not None:
            assert at.gpu.place.cpus == parse_cpulist(wanted["local_cpulist"])
        by_class: dict[str, set[str]] = {}
        for rail in at.rails:
            by_class.setdefault(rail.distance.name, set()).add(rail.nic.name)
        assert by_class == {
            kind: {name for joined in nics for name in joined.split("+")}
            for kind, nics in wanted["by_class"].items()
        }
        nearest = {name for joined in wanted["nearest_nics"] for name in joined.split("+")}
        assert {rail.nic.name for rail in at.rails if rail.assigned} <= nearest
        assert not nearest or any(rail.assigned for rail in at.rails)


HWLOC = answer_files("hwloc")


@pytest.mark.parametrize("path", HWLOC, ids=names(HWLOC))
def test_hwloc_captures(path: Path, tmp_path: Path) -> None:
    answer = read_answer(path)
    host = detect(tree_from_hwloc(source_of(answer), tmp_path))
    check(place(host, Policy()), answer)
    nodes = {str(node.number): format_cpulist(node.cpus) for node in host.nodes}
    assert nodes == answer["numa_cpulist"]
    rdma = {(nic.name, nic.place.pci) for nic in host.nics if nic.provider != "tcp"}
    assert rdma == {
        (name, device["bdf"]) for device in answer["devices"] for name in device["rdma_names"]
    }


NCCL = answer_files("nccl")


@pytest.mark.parametrize("path", NCCL, ids=names(NCCL))
def test_nccl_files_alone(path: Path) -> None:
    answer = read_answer(path)
    host = read_topology_file(source_of(answer))
    check(place(host, Policy()), answer)
    nodes = {str(node.number): format_cpulist(node.cpus) for node in host.nodes}
    assert nodes == answer["numa_cpulist"]


LSPCI = answer_files("lspci")


@pytest.mark.skipif(not LSPCI, reason="the collection is not beside the repository")
@pytest.mark.parametrize("path", LSPCI, ids=names(LSPCI))
def test_lspci_captures(path: Path, tmp_path: Path) -> None:
    answer = read_answer(path)
    placement = place(detect(tree_from_lspci(source_of(answer), tmp_path)), Policy())
    check(placement, answer)
    assigned = {nic.place.pci for at in placement.gpus for nic in at.nics}
    assert len(assigned) == len(placement.gpus)  # the dual-port cards on two switches carry nothing


TREES = sorted(collection().glob("sysfs/reconstructed/*.tar.gz"))


@pytest.mark.skipif(not TREES, reason="the collection is not beside the repository")
@pytest.mark.parametrize("archive", TREES, ids=names(TREES))
def test_reconstructed_trees(archive: Path, tmp_path: Path) -> None:
    """The same machines as sysfs trees that another program wrote."""
    name = archive.name.removesuffix(".tar.gz")
    answers = collection() / "answers"
    path = answers / ("lspci-dell-h100.json" if name == "dell-h100-cx7" else f"hwloc-{name}.json")
    answer = read_answer(path)
    host = detect(unpack(archive, tmp_path))
    if name == "dell-h100-cx7":  # the answer knows the NICs by address only
        by_pci = {nic.name: nic.place.pci for nic in host.nics}
        found = {
            at.gpu.place.pci: {by_pci[nic.name] for nic in at.nics}
            for at in place(host, Policy()).gpus
        }
        assert found == {a["gpu_bdf"]: {a["nearest_nic_bdfs"][0]} for a in answer["answers"]}
    else:
        check(place(host, Policy()), answer)


REAL = collection() / "answers" / "sysfs-real-trees.json"


@pytest.mark.skipif(not REAL.exists(), reason="the collection is not beside the repository")
@pytest.mark.parametrize("number", range(4))
def test_real_trees(number: int, tmp_path: Path) -> None:
    answer = json.loads(REAL.read_text())[number]
    root = unpack(source_of(answer), tmp_path)
    host = detect(root)
    nodes = {str(node.number): format_cpulist(node.cpus) for node in host.nodes}
    assert nodes == answer["numa"]
    _check_real_nics(host, answer)
    _check_real_counters(host, answer, Sysfs(root))
    if "gpu_memory_numa" in answer:  # CPU-less nodes hold the GPUs' memory
        near = {gpu.place.pci: format_cpulist(gpu.place.cpus) for gpu in host.gpus}
        assert near == {pci["bdf"]: pci["cpus_from_mask"] for pci in answer["pci"]}
        assert [gpu.place.numa for gpu in host.gpus] == [0, 0, 0, 8, 8, 8]


def _check_real_nics(host: Host, answer: dict[str, Any]) -> None:
    found = {nic.name: nic for nic in host.nics}
    places = {pci["bdf"]: pci for pci in answer["pci"]}
    for wanted in answer["rdma"]:
        if wanted["pci"] is None:
            assert wanted["name"] not in found
            continue
        nic = found[wanted["name"]]
        assert nic.place.pci == wanted["pci"]
        assert nic.rate_gbps == float(wanted["rate"].split()[0])
        assert nic.state == wanted["state"].split(": ")[1]
        assert nic.link_layer == wanted["link_layer"]
        assert str(nic.place.numa) == places[wanted["pci"]]["numa_node"]
    for wanted in answer["net"]:
        if wanted["pci"] is not None:
            nic = next(n for n in host.nics if wanted["name"] in (n.name, *n.interfaces))
            assert nic.place.pci == wanted["pci"]
            speed = int(wanted["speed"] or 0)
            assert nic.name != wanted["name"] or nic.rate_gbps == (speed / 1000 or None)


def _check_real_counters(host: Host, answer: dict[str, Any], sysfs: Sysfs) -> None:
    """Units of four octets; a counter of 32 bits that is stuck at its end says nothing."""
    reader = NicCounters(host.nics, sysfs=sysfs)
    for wanted in answer["rdma"]:
        if wanted["pci"] is not None:
            units = int(wanted["port_xmit_data"])
            known = None if units == 2**32 - 1 else units * 4
            assert reader.read(wanted["name"]).sent_bytes == known


@pytest.fixture(scope="module")
def p5(tmp_path_factory: pytest.TempPathFactory) -> Host:
    xml = OWN / "hwloc_xml" / "aws-p5.48xl.xml"
    return detect(tree_from_hwloc(xml, tmp_path_factory.mktemp("p5")))


def test_a_topology_file_of_another_machine_is_noticed_and_not_believed(p5: Host) -> None:
    file = read_topology_file(OWN / "nccl_xml" / "aws-p5.48xl-2026-handmade.xml")
    merged = override(p5, file)
    assert (merged.gpus, merged.nics) == (p5.gpus, p5.nics)
    (problem,) = merged.problems
    assert "does not describe this machine" in problem
    assert "0000:4f:00.0 is a NIC here, a GPU in the file" in problem


def test_one_gpu_of_p5_drives_the_four_nics_of_its_switch(p5: Host) -> None:
    placement = place(p5, Policy())
    assert [nic.name for nic in placement.gpus[0].nics] == [
        "rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0",
    ]  # fmt: skip
    assert {len(at.nics) for at in placement.gpus} == {4}


def test_p4d_file_brings_gpus_and_nics_nearer_than_sysfs_shows(tmp_path: Path) -> None:
    host = detect(tree_from_hwloc(OWN / "hwloc_xml" / "aws-p4d.24xl.xml", tmp_path))
    assert {at.rails[0].distance.name for at in place(host, Policy()).gpus} == {"PHB"}
    merged = override(host, read_topology_file(OWN / "nccl_xml" / "aws-p4d-24xl.xml"))
    assert merged.problems == ()
    placement = place(merged, Policy())
    assert {at.rails[0].distance.name for at in placement.gpus} == {"PIX"}
    assert placement.gpus[0].nics[0].rate_gbps == 100.0
    assert placement.gpus[0].gpu.place.cpus == host.gpus[0].place.cpus  # of this guest, 0-23
