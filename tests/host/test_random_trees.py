"""Random hosts of up to 16 GPUs and 32 NICs, and what must hold of every placement."""

import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pdnode.topology.balance import balance
from pdnode.topology.choose import FabricDevice, choose
from pdnode.topology.cpus import NumaNode
from pdnode.topology.detect import detect
from pdnode.topology.host import Distance, Gpu, Host, Nic, Place, distance
from pdnode.topology.place import Placement, place
from pdnode.topology.usable import Policy
from tests.support.host_tree import GPU, MELLANOX, HostTree

VERBS = Policy(provider="verbs")
RATES = (100.0, 200.0, 400.0)
CPUS = {0: frozenset(range(64)), 1: frozenset(range(64, 128))}


@st.composite
def places(draw: st.DrawFn, address: str) -> Place:
    """Somewhere below one of four host bridges, two a node, up to three bridges deep."""
    root = draw(st.integers(0, 3))
    numa = draw(st.sampled_from((root // 2, root // 2, root // 2, -1)))
    path: tuple[str, ...] = ()
    for _ in range(draw(st.integers(0, 3))):
        path = (*path, f"{''.join(path)}{draw(st.integers(0, 1))}")
    bridges = tuple(f"bridge-{root}-{step}" for step in path)
    return Place(address, f"pci0000:{root:02x}", bridges, numa, numa, CPUS.get(numa, frozenset()))


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    gpus = tuple(
        Gpu(draw(places(f"0001:{number:02x}:00.0"))) for number in range(draw(st.integers(0, 16)))
    )
    nics = tuple(
        Nic(
            name=f"mlx5_{number}",
            place=draw(places(f"0002:{number:02x}:00.0")),
            provider="verbs",
            rate_gbps=draw(st.sampled_from(RATES)),
            state=draw(st.sampled_from(("ACTIVE", "ACTIVE", "ACTIVE", "DOWN", ""))),
        )
        for number in range(draw(st.integers(0, 32)))
    )
    nodes = tuple(NumaNode(number, cpus) for number, cpus in CPUS.items())
    cores = tuple(
        frozenset({cpu, cpu + 32}) for start in (0, 64) for cpu in range(start, start + 32)
    )
    return Host(nodes, cores, gpus, nics)


def best(gpu: Gpu, usable: list[Nic]) -> list[Nic]:
    """By the naive rule: the nearest, and of these the fastest."""
    near = min(distance(gpu.place, nic.place) for nic in usable)
    nearest = [nic for nic in usable if distance(gpu.place, nic.place) == near]
    rate = max(nic.rate_gbps or 0.0 for nic in nearest)
    return [nic for nic in nearest if nic.rate_gbps == rate]


def check_nics(placement: Placement) -> None:
    usable = [verdict.nic for verdict in placement.nics if verdict.usable]
    assert all(nic.state != "DOWN" for nic in usable)
    used = {nic.name for at in placement.gpus for nic in at.nics}
    if not usable:
        assert used == set()
        return
    wanted = {at.gpu.place.pci: {nic.name for nic in best(at.gpu, usable)} for at in placement.gpus}
    for at in placement.gpus:
        mine = {nic.name for nic in at.nics}
        assert mine, "a GPU without a NIC while a usable one exists"
        assert mine <= wanted[at.gpu.place.pci]
    assert used == {name for names in wanted.values() for name in names}
    check_loads(placement, wanted)


def check_loads(placement: Placement, wanted: dict[str | None, set[str]]) -> None:
    """GPUs that want the same NICs get as many, NICs that the same GPUs want serve as many."""
    for at in placement.gpus:
        tied = [o for o in placement.gpus if wanted[o.gpu.place.pci] == wanted[at.gpu.place.pci]]
        loads = [len(other.nics) for other in tied]
        assert max(loads) - min(loads) <= 1
    serves = Counter(nic.name for at in placement.gpus for nic in at.nics)
    wanting = {
        name: frozenset(pci for pci, names in wanted.items() if name in names) for name in serves
    }
    for name in serves:
        loads = [serves[other] for other in serves if wanting[other] == wanting[name]]
        assert max(loads) - min(loads) <= 1


def check_threads(host: Host, placement: Placement) -> None:
    """One physical core a thread, none twice, all of the node where it is known."""
    core_of = {cpu: number for number, core in enumerate(host.cores) for cpu in core}
    cores = []
    for at in placement.gpus:
        threads = (at.threads.progress, *at.threads.worker)
        assert at.threads.problem == ""  # two nodes of 32 cores are enough for 16 GPUs
        cores += [core_of[cpu] for cpu in threads]
        assert len(threads) >= 2
        if at.gpu.place.numa >= 0:
            assert set(threads) <= CPUS[at.gpu.place.numa]
    assert len(set(cores)) == len(cores)


@settings(max_examples=150, deadline=None)
@given(hosts())
def test_every_placement_holds_the_rules(host: Host) -> None:
    placement = place(host, Policy())
    check_nics(placement)
    if all(gpu.place.cpus for gpu in host.gpus):
        check_threads(host, placement)
    for at in placement.gpus:
        assert [rail.distance for rail in at.rails] == sorted(r.distance for r in at.rails)
        assert all(rail.reason for rail in at.rails)
    assert all(verdict.reason for verdict in placement.nics)


@settings(max_examples=100, deadline=None)
@given(hosts(), st.randoms())
def test_device_groups_part_the_nics_as_placement_deals_them(host: Host, order: Random) -> None:
    """Some of the GPUs, in any order: each rank has all NICs of its GPU in its group, and a group
    has no NIC that none of its ranks was given."""
    placed = {
        at.gpu.place.pci or "": {nic.name for nic in at.nics} for at in place(host, VERBS).gpus
    }
    gpus = order.sample(sorted(placed), k=order.randint(0, len(placed)))
    devices = [FabricDevice(nic.name, nic.place.pci or "") for nic in host.nics]
    found = choose(
        host, VERBS, devices, gpus=gpus, address_of=lambda _: "192.0.2.1", default_route=""
    )
    group_of = {one.nic.name: one.group for one in found.chosen}
    assert len(group_of) == len(found.chosen), "a NIC is in one group"
    assert all(one.reason for one in (*found.chosen, *found.refused))
    if not any(placed[pci] for pci in gpus):
        assert (found.homes, set(group_of.values()) - {0}) == ((), set())
        return
    assert set(group_of) == set().union(*(placed[pci] for pci in gpus))
    assert set(found.homes) == set(group_of.values()) == set(range(max(found.homes) + 1))
    firsts = [found.homes.index(group) for group in range(max(found.homes) + 1)]
    assert firsts == sorted(firsts), "numbered by their first ranks"
    for pci, home in zip(gpus, found.homes, strict=True):
        assert {group_of[name] for name in placed[pci]} == {home}
    for one, mine in zip(gpus, found.homes, strict=True):  # no larger than sharing makes them
        reached = set(placed[one])
        while more := {n for g in gpus if placed[g] & reached for n in placed[g]} - reached:
            reached |= more
        assert {name for name, group in group_of.items() if group == mine} == reached


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 40).map(str),
        st.lists(st.integers(0, 7).map(str), min_size=1, max_size=8, unique=True),
    )
)
@example({"a": ["0", "1"], "b": ["0"], "c": ["1", "2"]})
def test_balance_cannot_be_made_more_even(choices: dict[str, list[str]]) -> None:
    """No single move improves it, and no chain of moves: compared with moving along all paths."""
    dealt = balance(choices)
    assert set(dealt) == set(choices)
    assert all(dealt[item] in choices[item] for item in choices)
    load = Counter(dealt.values())
    for start in {name for names in choices.values() for name in names}:
        reached = {start}
        while True:  # bins that an item can leave `start` for, directly or by moving others on
            more = {
                name for item in choices if dealt[item] in reached for name in choices[item]
            } - reached
            if not more:
                break
            reached |= more
        assert all(load[start] - load[other] <= 1 for other in reached)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(hosts())
def test_a_tree_in_sysfs_is_read_as_it_was_meant(host: Host) -> None:
    """The same hosts, written as files: classes and places survive."""
    with tempfile.TemporaryDirectory() as folder:
        tree = HostTree(Path(folder))
        tree.node(0, "0-63")
        tree.node(1, "64-127")
        for gpu in host.gpus:
            write(tree, gpu.place, GPU)
        for nic in host.nics:
            device = write(tree, nic.place, MELLANOX)
            state = f"4: {nic.state}" if nic.state else ""
            tree.rdma(nic.name, device, rate=f"{nic.rate_gbps} Gb/sec", state=state, layer="")
        found = detect(tree.root)
    assert len(found.gpus) == len(host.gpus)
    assert {(n.name, n.rate_gbps, n.state) for n in found.nics} == {
        (n.name, n.rate_gbps, n.state) for n in host.nics
    }
    by_name = {nic.name: nic for nic in found.nics}
    for gpu, wanted in zip(found.gpus, host.gpus, strict=True):
        assert (gpu.place.pci, gpu.place.numa) == (wanted.place.pci, wanted.place.numa)
        for nic in host.nics:
            expected: Distance = distance(wanted.place, nic.place)
            assert distance(gpu.place, by_name[nic.name].place) == expected


def write(tree: HostTree, place: Place, kind: tuple[str, str]) -> Path:
    """Names of bridges become addresses: the host bridge's number, then the steps."""
    assert place.pci is not None
    steps = [name.split("-") for name in place.bridges]
    bridges = tuple(f"10{root:>02}:{int('1' + bits, 2):02x}:00.0" for _, root, bits in steps)
    return tree.pci(place.pci, kind, under=bridges, root=place.root, numa=place.numa)
