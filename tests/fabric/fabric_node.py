"""A node of the fabric tests: one Fabric on loopback with one region, and its events."""

import json
import mmap
import os
import select
import subprocess
import time
from dataclasses import dataclass, field
from itertools import count

from pdnode.engine.protocol import COUNTER_PAGE_BYTES
from pdnode.fabric._native import Event, Fabric, LayerCounter
from pdnode.fabric.library import find_library

TOKEN = b"0123456789abcdef"
WAIT_S = 20.0
PROVIDERS = ("tcp", "tcp-rdm")
# Another library, and the provider of it that stands for the one that a test names
# (test_fake_suite.py runs tests of this folder on the fake libfabric).
LIBRARY = os.environ.get("PDNODE_TEST_LIBRARY", "auto")
DEVICE = os.environ.get("PDNODE_TEST_DEVICE", "")

Descriptors = list[tuple[int, list[tuple[int, int, int, int, int]]]]


@dataclass(slots=True, eq=False)
class Node:
    """`pages` pages of `page_bytes` in each of `layers` layers; NIC 0 is `host`."""

    provider: str = "tcp"
    pages: int = 64
    page_bytes: int = 4096
    layers: int = 1
    poll: str = "adaptive"
    port: int = 0
    host: str = "127.0.0.1"
    fabric: Fabric = field(init=False)
    memory: mmap.mmap = field(init=False)
    region: int = field(init=False)
    events: list[Event] = field(init=False, default_factory=list)
    numbers: "count[int]" = field(init=False, default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        library = find_library(LIBRARY, self.provider)
        self.fabric = Fabric(str(library), DEVICE or self.provider, self.poll)
        self.fabric.add_group([("lo", self.host)])
        if self.provider == "tcp":
            self.port = self.fabric.listen(0, self.host, self.port)
        fd = os.memfd_create("kv")
        os.ftruncate(fd, self.size)
        self.memory = mmap.mmap(fd, self.size)
        self.region = self.fabric.add_region(0, fd, self.size, self.page_bytes)
        os.close(fd)

    @property
    def size(self) -> int:
        return self.pages * self.page_bytes * self.layers

    @property
    def layer_stride(self) -> int:
        return self.pages * self.page_bytes

    def page(self, number: int, layer: int = 0) -> bytes:
        start = layer * self.layer_stride + number * self.page_bytes
        return self.memory[start : start + self.page_bytes]

    def fill(self, seed: int) -> None:
        """Different bytes in every 8 bytes of the region."""
        step = 8
        self.memory[:] = b"".join(
            (seed << 48 | offset).to_bytes(step, "little") for offset in range(0, self.size, step)
        )

    def wait(self, kind: str, timeout_s: float = WAIT_S, **fields: object) -> Event:
        """The first event of `kind` with these fields that no call has returned yet."""
        deadline = time.monotonic() + timeout_s
        while True:
            for index, event in enumerate(self.events):
                if event.kind == kind and all(getattr(event, k) == v for k, v in fields.items()):
                    return self.events.pop(index)
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {kind} {fields} within {timeout_s} s, but {self.events}"
            self.gather(left_s)

    def gather(self, timeout_s: float = 0.0) -> None:
        select.select([self.fabric.event_fd], [], [], timeout_s)
        self.events += self.fabric.take_events()

    def counter(self) -> tuple[int, LayerCounter, int]:
        """(number, worker side, page descriptor); the caller closes the descriptor."""
        fd = os.memfd_create("counter")
        os.ftruncate(fd, COUNTER_PAGE_BYTES)
        number = self.fabric.add_counter(fd)
        return number, LayerCounter(fd, [self.fabric.wake_fd(0)]), fd

    def submit(self, transfer: int, spans: list[tuple[int, int, int]], **changed: object) -> None:
        """A program of whole pages to rank 0 of a peer of the same geometry, due at once."""
        arguments: dict[str, object] = {
            "counter": -1,
            "base": 0,
            "layers": self.layers,
            "region": self.region,
            "source_layer_stride": self.layer_stride,
            "source_page_stride": self.page_bytes,
            "source_offset": 0,
            "remote_rank": 0,
            "remote_layer_stride": self.layer_stride,
            "remote_page_stride": self.page_bytes,
            "remote_offset": 0,
            "length": self.page_bytes,
            "whole_page": True,
        }
        arguments.update(changed)
        self.fabric.submit(transfer, spans=spans, **arguments)  # type: ignore[arg-type]

    def address(self, session: int) -> bytes:
        if self.provider == "tcp":
            return f"127.0.0.1:{self.port}".encode()
        return self.fabric.endpoint_name(session, 0)

    def open(self, session: int, token: bytes = TOKEN, *, writable: bool = True) -> Descriptors:
        self.fabric.open_session(session, [0], [self.region] if writable else [], token)
        self.wait("opened", session=session)
        return by_rank(self.fabric.descriptors(session))

    def close(self) -> None:
        self.fabric.close()
        self.memory.close()


def by_rank(descriptors: Descriptors) -> Descriptors:
    """The one region of a node is its rank 0."""
    return [(-1 if number < 0 else 0, pieces) for number, pieces in descriptors]


def immediate(slot: int, generation: int) -> int:
    return slot << 20 | generation << 12


def join(sender: Node, target: Node, session: int = 1, token: bytes = TOKEN) -> None:
    """One session, up on both sides; the target's region is open to the sender."""
    scratch = sender.open(session, token, writable=False)
    region = target.open(session, token)
    target.fabric.connect(session, (0, 0), sender.address(session), 5.0)
    if sender.provider != "tcp":
        sender.fabric.connect(session, (0, 0), target.address(session), 5.0)
    for node, descriptors in ((sender, region), (target, scratch)):
        node.wait("connected", session=session, pair=(0, 0))
        node.fabric.set_remote(session, descriptors)
    for node in (sender, target):
        node.fabric.probe(session)
    for node in (sender, target):
        node.wait("probed", session=session, pair=(0, 0))


def connect_process(
    sender: Node, process: "subprocess.Popen[str]", session: int, token: bytes
) -> None:
    """Joins `sender` to a `target_process.py`."""
    scratch = sender.open(session, token, writable=False)
    order = {"token": token.decode(), "endpoint": sender.address(session).hex(), "remote": scratch}
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    if sender.provider != "tcp":
        sender.fabric.connect(session, (0, 0), bytes.fromhex(answer["endpoint"]), 5.0)
    sender.wait("connected", session=session)
    sender.fabric.set_remote(
        session, [(rank, [tuple(piece) for piece in pieces]) for rank, pieces in answer["region"]]
    )
    sender.fabric.probe(session)
    sender.wait("probed", session=session)
