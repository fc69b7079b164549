"""One end of the transfer benchmark: a `Fabric` and its memory, in its own process."""

import json
import mmap
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdnode.bench.raw import Pages
from pdnode.engine.protocol import COUNTER_PAGE_BYTES
from pdnode.errors import PdnodeError
from pdnode.fabric._native import Event, Fabric

HOST = "127.0.0.1"
LOOPBACK = (("lo", HOST),)
SESSION = 1
WAIT_S = 60.0
CONNECT_S = 10.0
RUN_BYTES = 4 << 20
"""Length of a run of neighbouring pages: a long prompt's share of one layer."""

Descriptors = list[tuple[int, list[tuple[int, int, int, int, int]]]]


@dataclass(frozen=True, slots=True)
class Order:
    """Which pages go where; both ends derive it from the same numbers."""

    page_bytes: int
    size_bytes: int
    pattern: str  # "scattered" | "runs"
    seed: int

    @property
    def run_pages(self) -> int:
        if self.pattern == "scattered":
            return 1
        return max(1, min(RUN_BYTES, self.size_bytes // 4) // self.page_bytes)

    def starts(self) -> tuple[Pages, Pages]:
        """First pages of the runs, source and target, both in an order of their own."""
        runs = self.size_bytes // self.page_bytes // self.run_pages
        chance = np.random.default_rng(self.seed)
        source, target = (chance.permutation(runs) * self.run_pages for _ in range(2))
        return source.astype(np.uint32), target.astype(np.uint32)

    def pages(self) -> tuple[Pages, Pages]:
        """Page source[i] goes to target[i]."""
        steps = np.arange(self.run_pages, dtype=np.uint32)
        source, target = ((starts[:, None] + steps).reshape(-1) for starts in self.starts())
        return source, target

    def spans(self) -> list[tuple[int, int, int]]:
        source, target = self.starts()
        count = self.run_pages
        return [(s, t, count) for s, t in zip(source.tolist(), target.tolist(), strict=True)]


class BenchNode:
    """`size_bytes` of memory registered with NICs, (name, address) each; the caller is one thread.

    NIC i is joined to the peer's NIC i.
    """

    def __init__(
        self,
        *,
        library: str,
        provider: str,
        size_bytes: int,
        poll: str,
        cpu: int,
        listens: bool,
        window: int = 0,
        nics: Sequence[tuple[str, str]] = LOOPBACK,
    ) -> None:
        self.provider = provider
        self.nics = nics
        self.size_bytes = size_bytes
        self.fabric = Fabric(library, provider, poll, window)
        self.fabric.add_group(nics, cpu)
        self._ports = [
            self.fabric.listen(number, address, 0)
            for number, (_, address) in enumerate(nics)
            if listens and provider == "tcp"
        ]
        fd = os.memfd_create("bench", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
        self.region = self.fabric.add_region(0, fd, size_bytes, mmap.PAGESIZE)
        os.close(fd)
        self._events: list[Event] = []

    def fill(self, seed: int) -> None:
        """The same random bytes for the same seed, in every page different ones."""
        chance = np.random.default_rng(seed)
        self.memory.view(np.uint64)[:] = chance.integers(
            0, 1 << 63, self.size_bytes // 8, dtype=np.uint64
        )

    def endpoints(self) -> list[str]:
        """What the peer connects to, in hexadecimal, after `opened`; none where it listens."""
        if self.provider != "tcp":
            found = [self.fabric.endpoint_name(SESSION, nic) for nic in range(len(self.nics))]
        else:
            ends = zip(self.nics, self._ports, strict=False)
            found = [f"{address}:{port}".encode() for (_, address), port in ends]
        return [one.hex() for one in found]

    def open(self, token: str, *, writable: bool) -> Descriptors:
        regions = [self.region] if writable else []
        self.fabric.open_session(SESSION, range(len(self.nics)), regions, token.encode())
        self.wait("opened")
        return [
            (-1 if region < 0 else 0, pieces) for region, pieces in self.fabric.descriptors(SESSION)
        ]

    def connect(self, endpoints: list[str]) -> None:
        for nic, endpoint in enumerate(endpoints):
            self.fabric.connect(SESSION, (nic, nic), bytes.fromhex(endpoint), CONNECT_S)

    def join(self, remote: Descriptors) -> None:
        """After open() and connect(): the session is up when this returns."""
        for _ in self.nics:
            self.wait("connected")
        self.fabric.set_remote(SESSION, remote)
        self.fabric.probe(SESSION)
        for _ in self.nics:
            self.wait("probed")

    def wait(self, kind: str, **fields: object) -> Event:
        """The first event of this kind with these fields; PdnodeError if something fails."""
        deadline = time.monotonic() + WAIT_S
        while True:
            for index, event in enumerate(self._events):
                if event.kind == kind and all(getattr(event, k) == v for k, v in fields.items()):
                    return self._events.pop(index)
                if event.kind in ("lost", "failed", "overshoot"):
                    raise PdnodeError(f"waiting for {kind} {fields}: {event!r}")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PdnodeError(f"no {kind} {fields} within {WAIT_S:g} s")
            select.select([self.fabric.event_fd], [], [], left_s)
            self._events += self.fabric.take_events()

    def push(
        self,
        *,
        transfer: int,
        immediate: int,
        page_bytes: int,
        passes: int,
        spans: list[tuple[int, int, int]],
        counter: int = -1,
    ) -> None:
        """Open a transfer of whole pages that goes `passes` times over the same ones."""
        self.fabric.open_transfer(transfer, SESSION, immediate)
        self.fabric.submit(
            transfer,
            counter=counter,
            base=0,
            layers=passes,
            region=self.region,
            source_layer_stride=0,
            source_page_stride=page_bytes,
            source_offset=0,
            remote_rank=0,
            remote_layer_stride=0,
            remote_page_stride=page_bytes,
            remote_offset=0,
            length=page_bytes,
            whole_page=True,
            spans=spans,
        )
        self.fabric.finish(transfer)

    def add_counter(self) -> tuple[int, int]:
        """A layer counter: its number, and the page's descriptor, which the caller closes."""
        fd = os.memfd_create("counter", os.MFD_CLOEXEC)
        os.ftruncate(fd, COUNTER_PAGE_BYTES)
        return self.fabric.add_counter(fd), fd

    def close(self) -> None:
        self.fabric.close()


def immediate(*, slot: int, generation: int) -> int:
    return slot << 20 | generation << 12


def encode(**fields: object) -> str:
    """One line of the conversation between the two processes."""
    return json.dumps(fields) + "\n"


def as_descriptors(decoded: list[tuple[int, list[list[int]]]]) -> Descriptors:
    """JSON knows no tuples."""
    return [(rank, [(p[0], p[1], p[2], p[3], p[4]) for p in pieces]) for rank, pieces in decoded]
