"""Several NICs and several device groups: all of them are loopback here."""

import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pdnode.fabric._native import Event, Fabric, FabricError
from pdnode.fabric.library import find_library
from tests.fabric.fabric_node import LIBRARY, TOKEN, WAIT_S, Node, immediate

PAGES, PAGE_BYTES = 64, 65536
SIZE = PAGES * PAGE_BYTES
ROUNDS = 2000  # more than any transport moves before the fence comes


@dataclass(slots=True, eq=False)
class Host:
    """Two NICs, in one group or in one each; a region per group, number and rank alike."""

    groups: int
    fabric: Fabric = field(init=False)
    ports: list[int] = field(init=False)
    memories: list[mmap.mmap] = field(init=False, default_factory=list)
    events: list[Event] = field(init=False, default_factory=list)
    for_good: list[int] = field(init=False)  # bytes that are registered whatever the sessions

    def __post_init__(self) -> None:
        self.fabric = Fabric(str(find_library(LIBRARY, "tcp")), "tcp", "adaptive")
        nics = [("lo-a", "127.0.0.1"), ("lo-b", "127.0.0.1")]
        for named in [nics] if self.groups == 1 else [[nic] for nic in nics]:
            group = self.fabric.add_group(named)
            fd = os.memfd_create("kv")
            os.ftruncate(fd, SIZE)
            self.memories.append(mmap.mmap(fd, SIZE))
            assert self.fabric.add_region(group, fd, SIZE, PAGE_BYTES) == group
            os.close(fd)
        self.ports = [self.fabric.listen(nic, "127.0.0.1", 0) for nic in (0, 1)]
        self.for_good = self.registered()

    def registered(self) -> list[int]:
        """Bytes, by NIC."""
        return [int(row["registered_bytes"]) for row in self.fabric.nic_statistics()]

    wait = Node.wait
    gather = Node.gather

    def submit(
        self, transfer: int, rank: int, spans: list[tuple[int, int, int]], *, group: int = -1
    ) -> None:
        self.fabric.submit(
            transfer, counter=-1, base=0, layers=1, region=rank, source_layer_stride=SIZE,
            source_page_stride=PAGE_BYTES, source_offset=0, remote_rank=rank,
            remote_layer_stride=SIZE, remote_page_stride=PAGE_BYTES, remote_offset=0,
            length=PAGE_BYTES, whole_page=False, spans=spans, group=group,
        )  # fmt: skip


def link(sender: Host, target: Host) -> None:
    sender.fabric.open_session(1, [0, 1], [], TOKEN)
    target.fabric.open_session(1, [0, 1], list(range(target.groups)), TOKEN)
    for host in (sender, target):
        host.wait("opened")
    for nic in (0, 1):
        target.fabric.connect(1, (nic, nic), f"127.0.0.1:{sender.ports[nic]}".encode(), 5.0)
    sender.fabric.set_remote(1, target.fabric.descriptors(1))
    target.fabric.set_remote(1, sender.fabric.descriptors(1))
    for host in (sender, target):
        for nic in (0, 1):
            host.wait("connected", pair=(nic, nic))
        host.fabric.probe(1)
    for host in (sender, target):
        for nic in (0, 1):
            host.wait("probed", pair=(nic, nic))


@pytest.fixture(params=[1, 2], ids=["one-group", "two-groups"])
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Host]]:
    sender, target = Host(request.param), Host(request.param)
    for rank, memory in enumerate(sender.memories):
        memory[:] = os.urandom(SIZE)
        assert rank < request.param
    link(sender, target)
    yield sender, target
    sender.fabric.close()
    target.fabric.close()


@pytest.fixture
def sides() -> Iterator[tuple[Host, Host]]:
    """Two groups each."""
    sender, target = Host(2), Host(2)
    for memory in sender.memories:
        memory[:] = os.urandom(SIZE)
    link(sender, target)
    yield sender, target
    sender.fabric.close()
    target.fabric.close()


def everything() -> list[tuple[int, int, int]]:
    return [(page, PAGES - 1 - page, 1) for page in range(PAGES)]


def test_one_slot_counts_over_all_nics_and_drained_waits_for_all(
    hosts: tuple[Host, Host],
) -> None:
    sender, target = hosts
    target.fabric.arm(1, 0, 1, PAGES * target.groups)
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    for rank in range(sender.groups):
        sender.submit(1, rank, everything())
    sender.fabric.finish(1)
    assert target.wait("reached").count == PAGES * target.groups
    sender.wait("drained", transfer=1)
    for ours, theirs in zip(sender.memories, target.memories, strict=True):
        for source, destination, _ in everything():
            assert (
                theirs[destination * PAGE_BYTES : (destination + 1) * PAGE_BYTES]
                == ours[source * PAGE_BYTES : (source + 1) * PAGE_BYTES]
            )
    done = [row["done_pages"] for row in sender.fabric.nic_statistics()]
    assert sum(int(pages) for pages in done) == PAGES * sender.groups
    if "PDNODE_TEST_LIBRARY" not in os.environ:  # the fake may refuse one NIC for a while
        assert all(int(pages) > 0 for pages in done), "both NICs work"
    received = [row["received_units"] for row in target.fabric.nic_statistics()]
    assert received == done
    assert len(sender.fabric.close_transfer(1)) == sender.groups


def test_every_thread_turns_when_it_is_woken(hosts: tuple[Host, Host]) -> None:
    fabric = hosts[0].fabric
    before = fabric.turns()
    assert len(before) == hosts[0].groups
    deadline = time.monotonic() + WAIT_S
    for group, turns in enumerate(before):
        os.write(fabric.wake_fd(group), (1).to_bytes(8, "little"))
        while fabric.turns()[group] == turns:
            assert time.monotonic() < deadline, f"group {group} stands still"
            time.sleep(0.001)
    assert sum(fabric.turns()) <= fabric.statistics()["turns"]


def test_a_failure_on_one_nic_ends_the_transfer_on_all(hosts: tuple[Host, Host]) -> None:
    sender, target = hosts
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    submitted = 0

    def submit_more() -> None:
        nonlocal submitted
        for rank in range(sender.groups):
            sender.submit(1, rank, everything())
        submitted += sender.groups

    while sender.fabric.statistics()["posted_writes"] < 40:
        submit_more()
        sender.gather(0.001)
    target.fabric.fence(1, (0, 0))
    # However long this process is not scheduled, there are writes under way when the NIC is lost.
    while not any(event.kind in ("lost", "failed") for event in sender.events):
        submit_more()
        sender.gather(0)
    target.wait("fenced", pair=(0, 0))
    sender.wait("lost", pair=(0, 0))
    if not went_on(sender):
        assert sender.wait("failed", transfer=1).pairs in ([(0, 0)], [])
        assert sender.wait("settled", transfer=1).pairs in ([(0, 0)], [])
        assert sender.fabric.statistics()["posted_pages"] < submitted * PAGES
    assert sender.fabric.statistics()["writes"] == 0
    # The other pair lives: what its region holds can still be sent over it.
    rank = sender.groups - 1
    target.fabric.arm(2, 0, 1, PAGES)
    sender.fabric.open_transfer(2, 1, immediate(2, 0))
    sender.submit(2, rank, everything())
    sender.fabric.finish(2)
    target.wait("reached", slot=2)
    sender.wait("drained", transfer=2)
    statistics = target.fabric.peer_statistics()
    assert {(row["local_nic"], row["remote_nic"]) for row in statistics} == {(0, 0), (1, 1)}


def went_on(sender: Host) -> bool:
    """Whether transfer 1 owed nothing over the lost pair, and could go on over the other one.

    Only where the fake has refused that NIC for a while.
    """
    if "PDNODE_TEST_LIBRARY" not in os.environ:
        return False
    sender.fabric.stop(1)  # nothing changes where it has failed
    while True:
        for event in sender.events:
            if event.transfer == 1 and event.kind in ("drained", "failed"):
                return event.kind == "drained"
        sender.gather(1.0)  # pytest's own limit ends it


def test_the_whole_session_is_fenced_over_all_nics(hosts: tuple[Host, Host]) -> None:
    sender, target = hosts
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    for _ in range(ROUNDS):
        for rank in range(sender.groups):
            sender.submit(1, rank, everything())
    target.fabric.fence(1)
    target.wait("fenced", pair=(-1, -1))
    before = [bytes(memory) for memory in target.memories]
    sender.wait("failed", transfer=1)
    sender.wait("settled", transfer=1)
    assert [bytes(memory) for memory in target.memories] == before
    sender.fabric.fence(1)
    sender.wait("fenced", pair=(-1, -1))
    for host in hosts:
        host.gather()
        assert [event for event in host.events if event.kind == "fenced"] == []
        assert host.fabric.statistics()["connections"] == 0
        assert host.fabric.statistics()["sessions"] == 0


def test_a_group_without_nics_is_carried_by_the_other(sides: tuple[Host, Host]) -> None:
    sender, target = sides
    for host in sides:
        host.fabric.fence(1, (0, 0))
        host.wait("fenced", pair=(0, 0))
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    sender.submit(1, 0, everything())
    assert "no connection to rank 0" in sender.wait("failed", transfer=1).text

    registered = target.registered()[1]
    target.fabric.carry(1, 0, 1)
    assert target.wait("carried").text == ""
    assert target.registered()[1] == registered + SIZE
    sender.fabric.set_remote(1, target.fabric.descriptors(1))
    target.fabric.arm(2, 0, 1, 2 * PAGES)
    sender.fabric.open_transfer(2, 1, immediate(2, 0))
    for rank in (0, 1):
        sender.submit(2, rank, everything(), group=1)
    sender.fabric.finish(2)
    target.wait("reached", slot=2)
    sender.wait("drained", transfer=2)
    for ours, theirs in zip(sender.memories, target.memories, strict=True):
        assert pages_of(theirs) == pages_of(ours)[::-1]
    assert [row["done_pages"] for row in sender.fabric.nic_statistics()] == [0, 2 * PAGES]

    # Asked for again it is there; the fence of the session takes it away with the rest.
    target.fabric.carry(1, 0, 1)
    assert target.wait("carried").text == ""
    target.fabric.fence(1)
    target.wait("fenced", pair=(-1, -1))
    assert target.registered() == target.for_good


def test_what_a_group_carries_comes_back_with_its_nic(sides: tuple[Host, Host]) -> None:
    """Its fence closes what was carried; registered anew, the NIC has it again."""
    sender, target = sides
    target.fabric.carry(1, 0, 1)
    target.wait("carried")
    for host in sides:
        host.fabric.fence(1, (1, 1))
        host.wait("fenced", pair=(1, 1))
    assert target.registered()[1] == target.for_good[1]
    sender.fabric.open_session(1, [1], [], TOKEN)
    target.fabric.open_session(1, [1], [0, 1], TOKEN)
    for host in sides:
        host.wait("opened")
    target.fabric.connect(1, (1, 1), f"127.0.0.1:{sender.ports[1]}".encode(), 5.0)
    sender.fabric.set_remote(1, target.fabric.descriptors(1))
    target.fabric.set_remote(1, sender.fabric.descriptors(1))
    for host in sides:
        host.wait("connected", pair=(1, 1))
        host.fabric.probe(1)
    for host in sides:
        host.wait("probed", pair=(1, 1))
    target.fabric.arm(1, 0, 1, PAGES)
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    sender.submit(1, 0, everything(), group=1)
    sender.fabric.finish(1)
    target.wait("reached", slot=1)
    assert pages_of(target.memories[0]) == pages_of(sender.memories[0])[::-1]


def test_what_cannot_be_carried_is_refused_by_name(sides: tuple[Host, Host]) -> None:
    sender, target = sides
    for wrong, text in (
        ((1, 9, 1), "region 9 is not open to session 1"),
        ((1, 0, 5), "session 1 has no NIC of group 5"),
        ((7, 0, 1), "session 7 is not open"),
    ):
        with pytest.raises(FabricError, match=text):
            target.fabric.carry(*wrong)
    sender.fabric.open_transfer(1, 1, immediate(1, 0))
    with pytest.raises(FabricError, match="group 2 does not exist; there are 2"):
        sender.submit(1, 0, everything(), group=2)


def pages_of(memory: mmap.mmap) -> list[bytes]:
    return [memory[at : at + PAGE_BYTES] for at in range(0, SIZE, PAGE_BYTES)]
