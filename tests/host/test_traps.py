"""What real firmware, kernels and clouds do to a tree, each on a host made of a few files."""

import json
import random
from pathlib import Path

import pytest

from pdnode.topology.cpus import format_cpulist, parse_cpulist, parse_cpumask
from pdnode.topology.detect import detect, find_nic
from pdnode.topology.pci import link_gbps, normal_address
from pdnode.topology.place import Placement, place
from pdnode.topology.report import as_json, as_lines
from pdnode.topology.usable import Policy
from tests.support.host_tree import EFA, GPU, MELLANOX, HostTree, tree_from_hwloc
from tests.support.topology_data import OWN

SWITCH = ("15:01.0", "16:00.0")
NDR, EDR = "400 Gb/sec (4X NDR)", "100 Gb/sec (4X EDR)"


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.node(0, "0-3")
    tree.node(1, "4-7")
    return tree


def placed(tree: HostTree, policy: Policy | None = None) -> Placement:
    return place(detect(tree.root), policy or Policy())


def assigned(placement: Placement) -> dict[str, list[str]]:
    return {at.gpu.place.pci or "": [nic.name for nic in at.nics] for at in placement.gpus}


def usable(placement: Placement) -> set[str]:
    return {verdict.nic.name for verdict in placement.nics if verdict.usable}


def reason(placement: Placement, name: str) -> str:
    return next(verdict.reason for verdict in placement.nics if verdict.nic.name == name)


# NUMA nodes


def test_a_node_of_minus_one_is_asked_of_the_bridges(tree: HostTree) -> None:
    tree.pci("16:00.0", ("0x060400", "0x1000"), under=("15:01.0",), numa=1)
    tree.pci("19:00.0", GPU, under=SWITCH, numa=-1, cpulist="0-7")
    (gpu,) = detect(tree.root).gpus
    assert (gpu.place.numa, format_cpulist(gpu.place.cpus)) == (1, "4-7")


def test_then_of_the_local_cpus_if_one_node_holds_them(tree: HostTree) -> None:
    tree.pci("19:00.0", GPU, numa=-1, cpulist="4-5")
    tree.pci("1a:00.0", GPU, numa=-1, cpulist="0-7")
    tree.pci("1b:00.0", GPU)
    one, other, bare = (gpu.place for gpu in detect(tree.root).gpus)
    assert (one.numa, format_cpulist(one.cpus)) == (1, "4-5")
    assert (other.numa, format_cpulist(other.cpus)) == (-1, "0-7")
    assert (bare.numa, format_cpulist(bare.cpus)) == (-1, "0-7")


def test_a_node_that_contradicts_the_cpu_list_is_believed_and_noted(tree: HostTree) -> None:
    device = tree.pci("19:00.0", MELLANOX, numa=1, cpulist="0-7")
    tree.rdma("qib0", device)
    host = detect(tree.root)
    assert format_cpulist(host.nics[0].place.cpus) == "4-7"
    assert host.problems == (
        "0000:19:00.0: numa_node 1 and local_cpulist contradict each other; the node is believed",
    )


def test_a_node_that_does_not_exist_is_unknown(tree: HostTree) -> None:
    tree.pci("19:00.0", GPU, numa=9)
    host = detect(tree.root)
    assert host.gpus[0].place.numa == -1
    assert host.problems == ("0000:19:00.0: numa_node 9 is no node of this host",)


def test_a_node_without_cpus_lends_those_of_the_nearest(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.node(0, "0-3", "10 40 80")
    tree.node(8, "4-7", "40 10 20")
    tree.node(250, "", "80 20 10")
    tree.pci("19:00.0", GPU, numa=250)
    tree.rdma("mlx5_0", tree.pci("1a:00.0", MELLANOX, root="pci0000:10", numa=8))
    tree.rdma("mlx5_1", tree.pci("1b:00.0", MELLANOX, root="pci0000:20", numa=0))
    placement = placed(tree)
    place_ = placement.gpus[0].gpu.place
    assert (place_.numa, place_.home, format_cpulist(place_.cpus)) == (250, 8, "4-7")
    assert assigned(placement) == {"0000:19:00.0": ["mlx5_0"]}
    assert [rail.distance.name for rail in placement.gpus[0].rails] == ["NODE", "SYS"]


def test_an_unknown_node_is_near_to_nothing_and_is_spread(tree: HostTree) -> None:
    for number in range(4):
        tree.pci(f"1{number}:00.0", GPU, root=f"pci0001:0{number}", numa=-1, cpulist="0-7")
    for number in range(2):
        device = tree.pci(f"2{number}:00.0", EFA, root=f"pci0002:0{number}", numa=number)
        tree.rdma(f"rdmap{number}", device)
    placement = placed(tree)
    assert {rail.distance.name for at in placement.gpus for rail in at.rails} == {"SYS"}
    shares = [name for names in assigned(placement).values() for name in names]
    assert sorted(shares) == ["rdmap0", "rdmap0", "rdmap1", "rdmap1"]


def test_masks_and_lists_of_cpus() -> None:
    assert parse_cpulist("0-2,8\n") == {0, 1, 2, 8}
    assert parse_cpulist("") == frozenset()
    assert format_cpulist(parse_cpumask("0000,00000011,11111111")) == "0,4,8,12,16,20,24,28,32,36"
    assert parse_cpumask("1,,3") == {64, 0, 1}
    assert parse_cpumask("fff0000,00000000") == parse_cpulist("48-59")  # words of 7 digits occur
    for bad in ("3-1", "-1", "x", "0-99999999"):
        with pytest.raises(ValueError, match=r".+"):
            parse_cpulist(bad)
    with pytest.raises(ValueError, match="32-bit"):
        parse_cpumask("1,fffffffff")


# addresses and bridges


def test_addresses_as_drivers_and_wide_domains_write_them() -> None:
    assert normal_address("00000000:4F:00.0") == "0000:4f:00.0"
    assert normal_address("10000:00:04.0") == "10000:00:04.0"
    assert normal_address("0000:4f:00.8") is None
    assert normal_address("4f:00.0") is None


def test_domains_of_five_digits(tree: HostTree) -> None:
    under = ("10000:e0:06.0",)
    tree.pci("10000:e1:00.0", GPU, under=under, root="pci10000:e0", numa=0)
    device = tree.pci("10000:e1:00.1", MELLANOX, under=under, root="pci10000:e0", numa=0)
    tree.rdma("mlx5_0", device)
    (at,) = placed(tree).gpus
    assert at.gpu.place.pci == "10000:e1:00.0"
    assert at.rails[0].distance.name == "PIX"


@pytest.mark.parametrize(
    ("gpu_under", "nic_under", "nic_root", "expected"),
    [
        (SWITCH, SWITCH, "pci0000:15", "PIX"),
        ((*SWITCH, "17:01.0"), (*SWITCH, "17:02.0"), "pci0000:15", "PIX"),
        ((*SWITCH, "17:01.0", "18:00.0"), (*SWITCH, "17:02.0"), "pci0000:15", "PXB"),
        (SWITCH, ("15:02.0", "26:00.0"), "pci0000:15", "PHB"),
        ((), (), "pci0000:15", "PHB"),
        (SWITCH, SWITCH, "pci0000:25", "NODE"),
    ],
)
def test_distance_classes(
    tree: HostTree,
    gpu_under: tuple[str, ...],
    nic_under: tuple[str, ...],
    nic_root: str,
    expected: str,
) -> None:
    tree.pci("19:00.0", GPU, under=gpu_under, root="pci0000:15", numa=0)
    nic_under = nic_under if nic_root == "pci0000:15" else ("25:01.0", "26:00.0")
    device = tree.pci("1a:00.0", MELLANOX, under=nic_under, root=nic_root, numa=0)
    tree.rdma("mlx5_0", device)
    assert placed(tree).gpus[0].rails[0].distance.name == expected


# which NICs


def test_a_management_card_on_the_switch_of_the_gpu_loses(tree: HostTree) -> None:
    """As in a Dell XE9680: two Ethernet ports of 100 Gb/s beside one of 400 on InfiniBand."""
    tree.pci("19:00.0", GPU, under=(*SWITCH, "17:01.0"), numa=0)
    fast = tree.pci("1a:00.0", MELLANOX, under=(*SWITCH, "17:02.0"), numa=0)
    tree.rdma("mlx5_2", fast, rate=NDR)
    for function in (0, 1):
        card = tree.pci(f"1b:00.{function}", MELLANOX, under=(*SWITCH, "17:03.0"), numa=0)
        tree.rdma(f"mlx5_{function}", card, rate=EDR, layer="Ethernet")
    placement = placed(tree)
    assert assigned(placement) == {"0000:19:00.0": ["mlx5_2"]}
    assert reason(placement, "mlx5_0").startswith("Ethernet; the fabric here is InfiniBand")


def test_the_only_nic_on_the_switch_may_be_a_management_port(tree: HostTree) -> None:
    """RoCE on both: 25 Gb/s beside the GPU must not win over 400 behind another host bridge."""
    tree.pci("19:00.0", GPU, under=SWITCH, root="pci0000:15", numa=0)
    slow = tree.pci("1a:00.0", MELLANOX, under=SWITCH, root="pci0000:15", numa=0)
    tree.rdma("mlx5_0", slow, rate="25 Gb/sec (1X EDR)", layer="Ethernet")
    far = tree.pci("2a:00.0", MELLANOX, root="pci0000:25", numa=0)
    tree.rdma("mlx5_1", far, rate=NDR, layer="Ethernet")
    placement = placed(tree)
    assert assigned(placement) == {"0000:19:00.0": ["mlx5_1"]}
    assert reason(placement, "mlx5_0").startswith("25 Gb/s beside 400 Gb/s: taken for a management")
    asked = placed(tree, Policy(allow=("mlx5_*",)))
    assert assigned(asked) == {"0000:19:00.0": ["mlx5_0"]}  # the operator's word outranks ours


def test_one_fast_uplink_does_not_put_the_other_nics_out(tree: HostTree) -> None:
    tree.rdma("mlx5_8", tree.pci("3a:00.0", MELLANOX, numa=0), rate=NDR)
    for number in range(8):
        tree.pci(f"1{number}:00.0", GPU, under=(f"0{number}:01.0",), numa=0)
        device = tree.pci(f"2{number}:00.0", MELLANOX, under=(f"0{number}:01.0",), numa=0)
        tree.rdma(f"mlx5_{number}", device, rate=EDR)
    pairs = assigned(placed(tree))
    assert pairs == {f"0000:1{number}:00.0": [f"mlx5_{number}"] for number in range(8)}


def test_a_narrow_slot_counts_and_not_what_an_idle_link_shows(tree: HostTree) -> None:
    tree.pci("19:00.0", GPU, under=SWITCH, numa=0, link=("2.5", 16))
    idle = tree.pci("1a:00.0", MELLANOX, under=SWITCH, numa=0, link=("2.5", 16))
    tree.write(idle / "max_link_speed", "32.0 GT/s PCIe")
    tree.write(idle / "max_link_width", "16")
    tree.rdma("mlx5_0", idle, rate=NDR)
    narrow = tree.pci("1b:00.0", MELLANOX, under=SWITCH, numa=0, link=("32.0", 1))
    tree.rdma("mlx5_1", narrow, rate=NDR)
    placement = placed(tree)
    assert assigned(placement) == {"0000:19:00.0": ["mlx5_0"]}
    assert reason(placement, "mlx5_1").startswith("31.51 Gb/s by its PCIe slot beside 400 Gb/s")
    assert link_gbps("8 GT/s", "16") == pytest.approx(126.03, abs=0.01)
    assert link_gbps("5.0 GT/s PCIe", "8") == pytest.approx(32)
    assert link_gbps("Unknown", "16") is link_gbps("32.0 GT/s PCIe", "0") is None


def test_virtual_functions_fold_into_the_physical_one(tree: HostTree) -> None:
    tree.pci("19:00.0", GPU, numa=0)
    physical = tree.pci("1a:00.0", MELLANOX, numa=0)
    tree.rdma("mlx5_0", physical)
    for number in (1, 2):
        virtual = tree.pci(f"1a:00.{number}", MELLANOX, numa=0)
        (tree.root / virtual / "physfn").symlink_to("../0000:1a:00.0")
        tree.rdma(f"mlx5_{number}", virtual)
    placement = placed(tree)
    assert usable(placement) == {"mlx5_0"}
    assert "virtual function of 0000:1a:00.0" in reason(placement, "mlx5_1")
    without = placed(tree, Policy(deny=("0000:1a:00.0",)))
    assert assigned(without) == {"0000:19:00.0": ["mlx5_1"]}  # one port, so one function


def test_both_ports_of_a_card_are_used_however_they_show(tree: HostTree) -> None:
    """Two functions, two devices on one function, or one device with two ports."""
    tree.pci("19:00.0", GPU, under=SWITCH, numa=0)
    for function in (0, 1):
        tree.rdma(f"mlx5_{function}", tree.pci(f"1a:00.{function}", MELLANOX, under=SWITCH))
    one = tree.pci("1b:00.0", MELLANOX, under=SWITCH)
    tree.rdma("mlx5_2", one)
    tree.rdma("mlx5_3", one)
    two = tree.pci("1c:00.0", MELLANOX, under=SWITCH)
    tree.rdma("mlx4_0", two, state="1: DOWN", rate="10 Gb/sec", ports=1)
    tree.write(two / "infiniband/mlx4_0/ports/2/state", "4: ACTIVE")
    tree.write(two / "infiniband/mlx4_0/ports/2/rate", NDR)
    pairs = assigned(placed(tree))
    assert sorted(pairs["0000:19:00.0"]) == ["mlx4_0", "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]


def test_ports_that_are_down_and_software_devices(tree: HostTree) -> None:
    tree.pci("19:00.0", GPU, numa=0)
    tree.rdma("mlx5_0", tree.pci("1a:00.0", MELLANOX, numa=0), state="1: DOWN")
    tree.rdma("rxe0", None)
    tree.net("ens3", tree.pci("1b:00.0", ("0x020000", "0x8086"), numa=0))
    tree.write("devices/virtual/net/lo/operstate", "unknown")
    tree.link("class/net/lo", Path("devices/virtual/net/lo"))
    placement = placed(tree)
    assert {verdict.nic.name for verdict in placement.nics} == {"mlx5_0", "ens3"}
    assert reason(placement, "mlx5_0") == "its port is DOWN"
    assert assigned(placement) == {"0000:19:00.0": ["ens3"]}  # tcp where no RDMA port is up
    assert usable(placed(tree, Policy(provider="verbs"))) == set()


def test_the_interface_of_an_rdma_device_carries_tcp(tree: HostTree) -> None:
    device = tree.pci("1a:00.0", MELLANOX, numa=0)
    tree.rdma("mlx5_0", device)
    tree.net("ens1np0", device)
    host = detect(tree.root)
    assert [nic.name for nic in host.nics] == ["mlx5_0"]
    assert usable(place(host, Policy(provider="tcp"))) == {"mlx5_0"}
    nic = host.nics[0]
    assert [find_nic(host, n) for n in ("ens1np0", "0000:1A:00.0", "mlx5_0", "x")] == [nic] * 3 + [
        None
    ]


def test_allow_and_deny(tree: HostTree) -> None:
    tree.pci("19:00.0", GPU, numa=0)
    for number in range(3):
        tree.rdma(f"mlx5_{number}", tree.pci(f"1a:00.{number}", MELLANOX, numa=0))
    policy = Policy(allow=("mlx5_?",), deny=("mlx5_1", "eth9"))
    placement = placed(tree, policy)
    assert usable(placement) == {"mlx5_0", "mlx5_2"}
    assert usable(placed(tree, Policy(allow=("0000:1a:00.2",)))) == {"mlx5_2"}
    assert reason(placement, "mlx5_1") == "denied by topology.deny"
    assert placement.problems == ('"eth9" of topology.deny matches no NIC of this host',)
    nothing = placed(tree, Policy(allow=("eth9",)))
    assert assigned(nothing) == {"0000:19:00.0": []}
    assert "no usable NIC" in nothing.problems


# what is missing


def test_an_empty_tree_works(tmp_path: Path) -> None:
    placement = place(detect(tmp_path), Policy())
    assert (placement.gpus, placement.nics) == ((), ())
    assert placement.problems == (f"{tmp_path} shows no PCI device",)


def test_gpus_without_nics_and_nics_without_gpus(tree: HostTree) -> None:
    tree.pci("19:00.0", GPU, numa=0)
    assert placed(tree).problems == ("no usable NIC",)


def test_nothing_but_class_files_and_files_that_fail(tree: HostTree) -> None:
    """A folder where a file should be fails like EIO does; text that is no text likewise."""
    gpu = tree.pci("19:00.0", GPU)
    device = tree.pci("1a:00.0", MELLANOX)
    for folder in (gpu, device):
        for name in ("numa_node", "local_cpulist", "local_cpus", "current_link_speed"):
            (tree.root / folder / name).mkdir()
    tree.rdma("mlx5_0", device, rate="", state="", layer="")
    (tree.root / device / "infiniband/mlx5_0/ports/1/rate").mkdir(parents=True)
    (tree.root / device / "infiniband/mlx5_0/ports/1/state").write_bytes(b"\xff\xfe\x00")
    placement = placed(tree)
    assert assigned(placement) == {"0000:19:00.0": ["mlx5_0"]}
    assert reason(placement, "mlx5_0") == "verbs, state of its port unknown, rate unknown"
    assert placement.gpus[0].gpu.place.numa == -1


def test_plain_folders_instead_of_links(tree: HostTree) -> None:
    """A copied tree may have lost its links: then no bridge is known, and none is made up."""
    for address, code in (("0000:19:00.0", "0x030200"), ("0000:1a:00.0", "0x020700")):
        tree.write(f"bus/pci/devices/{address}/class", code)
        tree.write(f"bus/pci/devices/{address}/numa_node", "1")
    tree.write("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    placement = placed(tree)
    assert placement.nics[0].nic.place.pci is None
    assert assigned(placement) == {"0000:19:00.0": ["mlx5_0"]}


def test_board_graphics_are_no_gpus(tree: HostTree) -> None:
    tree.pci("03:00.0", ("0x030000", "0x1a03"))  # ASPEED, in every server
    tree.pci("04:00.0", ("0x030000", "0x1002"))  # an ATI board controller
    tree.pci("05:00.0", ("0x068000", "0x10de"))  # NVSwitch
    tree.pci("06:00.0", ("0x030000", "0x10de"))
    tree.pci("07:00.0", ("0x120000", "0x1002"))
    assert [gpu.place.pci for gpu in detect(tree.root).gpus] == ["0000:06:00.0", "0000:07:00.0"]


JUNK = (
    b"",
    b"-1",
    b"9" * 6000,
    b"\xff\xfe",
    b"0-99999999",
    b"x",
    b"4: DOWN",
    b"0 Gb/sec",
    b"1,2,,3-",
)


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_full_of_junk_is_still_placed(tmp_path: Path, seed: int) -> None:
    """A third of the files of a real machine is gone, unreadable or says something else."""
    root = tree_from_hwloc(OWN / "hwloc_xml" / "aws-p4d.24xl.xml", tmp_path)
    chance = random.Random(seed)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    for path in chance.sample(files, len(files) // 3):
        what = chance.choice((*JUNK, None))
        if what is None:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(what)
    placement = place(detect(root), Policy())
    assert json.loads(json.dumps(as_json(placement), allow_nan=False))["gpus"]
    assert len(list(as_lines(placement))) > len(placement.gpus)
    if any(verdict.usable for verdict in placement.nics):
        assert all(at.nics for at in placement.gpus)
