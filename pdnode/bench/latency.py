"""Raise to post: from the store of the layer counter by another process to the entry of the first
fi_writemsg of that layer, as the core records it. One clock (CLOCK_MONOTONIC), one host.

`python -m pdnode.bench.latency PAGE_FD WAKE_FD READY_FD RAISES CPU` is that other process: it
closes READY_FD when it is ready and begins at the end of its standard input.
"""

import mmap
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import numpy as np
from rich.progress import Progress

from pdnode.bench.pair import Pair
from pdnode.bench.raw import raise_periodically
from pdnode.engine.protocol import COUNTER_PAGE_BYTES
from pdnode.errors import PdnodeError
from pdnode.fabric.library import find_library

PERIOD_NS = 1_000_000
SIZE_BYTES = 1 << 20
PAGE_BYTES = 4096
LOAD_BYTES = 16 << 10
LOAD_WINDOW = 32
LOAD_TRANSFER_WRITES = 65_536
"""A page a layer, so that each is a write of its own."""
LOAD_WRITES_PER_RAISE = 300
"""More than any loopback takes in a millisecond: 4.9 GB/s."""
MODES = (
    ("busy_idle", "busy", False),
    ("busy_loaded", "busy", True),
    ("adaptive", "adaptive", False),
)
MARGIN_RAISES = 2000
"""Periods that the raiser may be late by, with the load already there."""
EXIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Microseconds."""

    p50: float
    p99: float
    p99_9: float
    max: float


def measure(
    provider: str, *, raises: int, cpus: tuple[int, int], bar: Progress
) -> dict[str, Latency]:
    task = bar.add_task("raise to post", total=len(MODES))
    found: dict[str, Latency] = {}
    for name, poll, loaded in MODES:
        bar.update(task, description=f"raise to post, {name}")
        bar.refresh()
        with Pair(
            library=str(find_library("auto", provider)),
            provider=provider,
            size_bytes=SIZE_BYTES,
            poll=poll,
            cpus=cpus,
            window=LOAD_WINDOW if loaded else 0,
        ) as pair:
            found[name] = summary(raise_layers(pair, raises=raises, loaded=loaded, cpu=cpus[1]))
        bar.advance(task)
    return found


def raise_layers(pair: Pair, *, raises: int, loaded: bool, cpu: int) -> list[int]:
    """Nanoseconds of each raise; every raise is one layer of one page."""
    number, page_fd = pair.node.add_counter()
    wake_fd = pair.node.fabric.wake_fd(0)
    slot, value = pair.arm(raises, scrub=False)
    pair.node.push(
        transfer=slot,
        immediate=value,
        page_bytes=PAGE_BYTES,
        passes=raises,
        spans=[(0, 0, 1)],
        counter=number,
    )
    ready_fd, ready_there = os.pipe()
    arguments = [str(fd) for fd in (page_fd, wake_fd, ready_there, raises, cpu)]
    # A file, not a pipe: nobody reads before the end.
    with (
        tempfile.TemporaryFile() as out,
        subprocess.Popen(
            [sys.executable, "-m", "pdnode.bench.latency", *arguments],
            stdin=subprocess.PIPE,
            stdout=out,
            pass_fds=(page_fd, wake_fd, ready_there),
        ) as raiser,
    ):
        os.close(page_fd)
        os.close(ready_there)
        with os.fdopen(ready_fd, "rb") as ready:
            ready.read()
        load = Load(pair, LOAD_WRITES_PER_RAISE * (raises + MARGIN_RAISES)) if loaded else None
        assert raiser.stdin is not None
        raiser.stdin.close()  # go
        pair.node.wait("drained", transfer=slot)
        if load is not None:
            load.stop()
        raiser.wait(EXIT_S)
        out.seek(0)
        stored = np.frombuffer(out.read(), np.int64)
    pair.ask("reached", slot=slot)
    record = pair.node.fabric.close_transfer(slot)
    if len(stored) != raises or len(record) != raises:
        raise PdnodeError(f"{raises} raises, {len(stored)} stored and {len(record)} posted")
    posted = np.array([posted_ns for _, _, _, posted_ns, _, _, _ in record])
    return [int(delay) for delay in posted - stored]


class Load:
    """Writes of 16 KiB of other requests, always as many in flight as the window holds.

    All are handed over before the first raise: a call from Python, or the record of a transfer made
    meanwhile, would take the sender's core away from its progress thread for a time slice.
    """

    def __init__(self, pair: Pair, writes: int) -> None:
        self._pair = pair
        self._open: list[int] = []
        for _ in range(-(-writes // LOAD_TRANSFER_WRITES)):
            self._add()
        self._wait_taken()

    def _add(self) -> None:
        slot, value = self._pair.arm(LOAD_TRANSFER_WRITES, scrub=False)
        self._pair.node.push(
            transfer=slot,
            immediate=value,
            page_bytes=LOAD_BYTES,
            passes=LOAD_TRANSFER_WRITES,
            spans=[(1, 1, 1)],
        )
        self._open.append(slot)

    def _wait_taken(self) -> None:
        """The progress thread has made the records of all: milliseconds for each transfer. It takes
        orders in their order, and this last one has nothing to write.
        """
        slot, value = self._pair.arm(1, scrub=False)
        self._pair.node.push(
            transfer=slot, immediate=value, page_bytes=LOAD_BYTES, passes=1, spans=[]
        )
        self._pair.node.wait("drained", transfer=slot)
        self._pair.node.fabric.close_transfer(slot)

    def stop(self) -> None:
        """Raises PdnodeError if the load was over before: then it was not always there."""
        if self._pair.node.fabric.statistics()["writes"] == 0:
            raise PdnodeError("the load ended before the last raise")
        for slot in self._open:
            self._pair.node.fabric.stop(slot)
        for slot in self._open:
            self._pair.node.wait("drained", transfer=slot)
            self._pair.node.fabric.close_transfer(slot)


def summary(delays_ns: list[int]) -> Latency:
    p50, p99, p99_9 = np.percentile(delays_ns, (50, 99, 99.9)) / 1000
    return Latency(
        p50=round(float(p50), 3),
        p99=round(float(p99), 3),
        p99_9=round(float(p99_9), 3),
        max=round(max(delays_ns) / 1000, 3),
    )


def main() -> int:
    page_fd, wake_fd, ready_fd, raises, cpu = map(int, sys.argv[1:6])
    os.sched_setaffinity(0, {cpu})
    page = np.frombuffer(mmap.mmap(page_fd, COUNTER_PAGE_BYTES), np.uint8)
    stored = np.zeros(raises, np.int64)
    os.close(ready_fd)
    sys.stdin.read()
    raise_periodically(page=page, wake_fd=wake_fd, period_ns=PERIOD_NS, stored=stored)
    sys.stdout.buffer.write(stored.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
