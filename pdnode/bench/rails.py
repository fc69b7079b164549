"""`pdnode bench rails`: several NICs against one, and against a bare libfabric loop on all of them.

Makes a network namespace with the target in it and a veth pair for each NIC, held to a rate by a
token bucket; so it needs root, `ip` and `tc`. What counts are the ratios within a turn.
"""

import json
import os
import resource
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress

from pdnode.bench.network import Rails, rails
from pdnode.bench.node import Order
from pdnode.bench.pair import Pair, cores
from pdnode.bench.raw import GATHERS, WINDOWS
from pdnode.errors import PdnodeError
from pdnode.fabric.library import find_library

PAGE_BYTES = 64 << 10
PASSES = 4


@dataclass(frozen=True, slots=True)
class Result:
    """Rates are medians; ratios are medians of those within a turn. `cpus`: cores that the sender
    kept busy on average while the core sent over all NICs."""

    nics: int
    mbit_per_s: int  # of each
    turns: int
    one_nic_mbit_per_s: float
    all_nics_mbit_per_s: float
    bare_mbit_per_s: float  # on all NICs
    speedup: float  # all NICs / one
    ratio_to_bare: float
    cpus: float


def run(*, nics: int, mbit: int, turns: int, mib: int) -> Result:
    """Measure; a bar goes to standard error. PdnodeError without root or tools."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        raise PdnodeError("bench rails needs root, ip and tc: it makes a network namespace")
    with (
        Progress(console=Console(stderr=True), auto_refresh=False) as bar,
        rails(nics, mbit=mbit) as network,
    ):
        task = bar.add_task(f"{nics} NICs of {mbit} Mbit/s", total=3 * turns)

        def step() -> None:
            bar.advance(task)
            bar.refresh()

        before, cpus = os.sched_getaffinity(0), cores()
        os.sched_setaffinity(0, {cpus[0]})  # the core and the bare loops have the same
        try:
            return measure(
                network, mbit=mbit, turns=turns, size_bytes=mib << 20, cpus=cpus, step=step
            )
        finally:
            os.sched_setaffinity(0, before)


def as_json(result: Result) -> str:
    return json.dumps(asdict(result))


def as_line(one: Result) -> str:
    return (
        f"{one.nics} NICs of {one.mbit_per_s} Mbit/s: {one.all_nics_mbit_per_s:.0f} Mbit/s, "
        f"{one.speedup:.2f} times one NIC ({one.one_nic_mbit_per_s:.0f}), "
        f"{one.ratio_to_bare:.3f} of a bare loop on all ({one.bare_mbit_per_s:.0f}); "
        f"{one.cpus:.2f} cores busy on the sender"
    )


@contextmanager
def _pair(network: Rails, count: int, size_bytes: int, cpus: tuple[int, int]) -> Iterator[Pair]:
    used = network.nics[:count]
    with Pair(
        library=str(find_library("auto", "tcp")),
        provider="tcp",
        size_bytes=size_bytes,
        poll="adaptive",
        cpus=cpus,
        nics=[(rail.here, rail.address_here) for rail in used],
        there=[(rail.there, rail.address_there) for rail in used],
        prefix=("ip", "netns", "exec", network.netns),
    ) as pair:
        yield pair


def measure(
    network: Rails,
    *,
    mbit: int,
    turns: int,
    size_bytes: int,
    cpus: tuple[int, int],
    step: Callable[[], None],
) -> Result:
    count = len(network.nics)
    order = Order(page_bytes=PAGE_BYTES, size_bytes=size_bytes, pattern="scattered", seed=1)

    def rate(elapsed_ns: int, passes: int) -> float:
        return size_bytes * passes * 8e3 / elapsed_ns

    one: list[float] = []
    every: list[float] = []
    bare: list[float] = []
    busy_s = lasted_s = 0.0
    with (
        _pair(network, 1, size_bytes, cpus) as single,
        _pair(network, count, size_bytes, cpus) as whole,
    ):
        for pair in (single, whole):  # touches the memory
            pair.core(order, 1)
            pair.bare(order, 1, window=WINDOWS[0], gather=1)
        settings = [(window, gather) for window in WINDOWS for gather in GATHERS]
        best = min(settings, key=lambda s: whole.bare(order, 1, window=s[0], gather=s[1]))
        for _ in range(turns):
            one.append(rate(single.core(order, 1), 1))
            step()
            used_s = _cpu_s()
            elapsed_ns = whole.core(order, PASSES)
            every.append(rate(elapsed_ns, PASSES))
            busy_s, lasted_s = busy_s + _cpu_s() - used_s, lasted_s + elapsed_ns / 1e9
            step()
            bare.append(rate(whole.bare(order, PASSES, window=best[0], gather=best[1]), PASSES))
            step()
    return Result(
        nics=count,
        mbit_per_s=mbit,
        turns=turns,
        one_nic_mbit_per_s=round(statistics.median(one), 1),
        all_nics_mbit_per_s=round(statistics.median(every), 1),
        bare_mbit_per_s=round(statistics.median(bare), 1),
        speedup=round(statistics.median(a / b for a, b in zip(every, one, strict=True)), 3),
        ratio_to_bare=round(statistics.median(a / b for a, b in zip(every, bare, strict=True)), 3),
        cpus=round(busy_s / lasted_s, 2),
    )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
