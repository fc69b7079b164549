"""`pdnode bench transfer`: the core against a bare libfabric loop, in the same call.

Per cell (provider, page size, pattern): the bare loop's windows are tried, with one page an
operation and with four gathered ones; then the core and the best of each take turns. What counts
is the ratio within a turn, because rates on shared machines flip between regimes. A connection and
the memory of its two processes have luck of their own, which lasts: so all cells are measured on
one connection after the other.
"""

import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import exp, fsum, log
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pdnode.bench.latency import Latency, measure
from pdnode.bench.node import Order
from pdnode.bench.pair import Pair, cores
from pdnode.bench.plan import Plan
from pdnode.bench.raw import GATHERS, WINDOWS, configurations
from pdnode.fabric._native import Fabric
from pdnode.fabric.library import find_library

CONNECTIONS = 3
"""Pairs of processes of a provider, one after the other; each measures every cell."""
CALIBRATIONS = 2
LONG_PASSES = 4
"""Times over the memory where once would be over in a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the result. Rates are medians; the ratios are those within each pair."""

    provider: str
    library: str
    page_bytes: int
    pattern: str
    gbytes_per_s: float
    raw_one_page_gbytes_per_s: float
    raw_best_gbytes_per_s: float
    ratio: float
    ratio_q1: float
    ratio_q3: float


class Turn(NamedTuple):
    """Rates in GB/s, measured one after the other: of the core, and of the bare loop with one page
    an operation and with whatever was best on this connection."""

    core: float
    one_page: float
    best: float


def take_turns(pair: Pair, order: Order, turns: int, step: Callable[[], None]) -> list[Turn]:
    short = order.page_bytes < 64 << 10
    raw_passes = 1 if short else LONG_PASSES
    core_passes = 1 if short and order.pattern == "scattered" else LONG_PASSES

    def bare(window: int, gather: int) -> float:
        elapsed_ns = pair.bare(order, raw_passes, window=window, gather=gather)
        step()
        return order.size_bytes * raw_passes / elapsed_ns

    def core() -> float:
        elapsed_ns = pair.core(order, core_passes)
        step()
        return order.size_bytes * core_passes / elapsed_ns

    core()  # touches the memory, as the first of the bare loop does
    bare(WINDOWS[0], 1)
    tried = {
        setting: max(bare(*setting) for _ in range(CALIBRATIONS)) for setting in configurations()
    }
    windows = {
        gather: max(WINDOWS, key=lambda window, by=gather: tried[window, by])  # type: ignore[misc]
        for gather in GATHERS
    }
    rates: dict[int, list[float]] = {0: [], **{gather: [] for gather in GATHERS}}
    for number in range(turns):
        runners = list(rates)
        for runner in runners[number % len(runners) :] + runners[: number % len(runners)]:
            rates[runner].append(core() if runner == 0 else bare(windows[runner], runner))
    best = max(GATHERS, key=lambda gather: statistics.median(rates[gather]))
    return [Turn(*rate) for rate in zip(rates[0], rates[1], rates[best], strict=True)]


def cell_of(turns: Sequence[Turn], *, provider: str, library: str, order: Order) -> Cell:
    ratios = [turn.core / turn.best for turn in turns]
    q1, middle, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
    core, one_page, best = (statistics.median(rates) for rates in zip(*turns, strict=True))
    return Cell(
        provider=provider,
        library=library,
        page_bytes=order.page_bytes,
        pattern=order.pattern,
        gbytes_per_s=round(core, 4),
        raw_one_page_gbytes_per_s=round(one_page, 4),
        raw_best_gbytes_per_s=round(best, 4),
        ratio=round(middle, 4),
        ratio_q1=round(q1, 4),
        ratio_q3=round(q3, 4),
    )


def measure_cells(plan: Plan, cpus: tuple[int, int], bar: Progress) -> list[Cell]:
    turns = -(-plan.pairs // CONNECTIONS)
    orders = [
        Order(page_bytes=size, size_bytes=plan.size_bytes, pattern=pattern, seed=size)
        for pattern in plan.patterns
        for size in plan.page_bytes
    ]
    runs = 2 + CALIBRATIONS * len(configurations()) + turns * (1 + len(GATHERS))
    task = bar.add_task("", total=len(plan.providers) * CONNECTIONS * len(orders) * runs)

    def step() -> None:
        bar.advance(task)
        bar.refresh()

    found: list[Cell] = []
    for provider in plan.providers:
        path = str(find_library("auto", provider))
        version = Fabric(path, provider, "adaptive").library_version
        taken: dict[Order, list[Turn]] = {order: [] for order in orders}
        for _ in range(CONNECTIONS):
            with Pair(
                library=path,
                provider=provider,
                size_bytes=plan.size_bytes,
                poll="adaptive",
                cpus=cpus,
            ) as pair:
                for order in orders:
                    what = f"{provider} {order.pattern} {order.page_bytes >> 10} KiB"
                    bar.update(task, description=what)
                    taken[order] += take_turns(pair, order, turns, step)
        found += [
            cell_of(taken[order], provider=provider, library=version, order=order)
            for order in orders
        ]
    return found


def run(plan: Plan, *, as_json: bool, out: Callable[[str], None]) -> None:
    """Measure and print; the bar goes to standard error. Raises PdnodeError on wrong bytes."""
    before = os.sched_getaffinity(0)
    cpus = cores()
    # Without a refresh thread: it would run on the sender's core.
    with Progress(console=Console(stderr=True), auto_refresh=False) as bar:
        try:
            os.sched_setaffinity(0, {cpus[0]})
            cells = measure_cells(plan, cpus, bar)
            latencies = measure(plan.providers[0], raises=plan.raises, cpus=cpus, bar=bar)
        finally:
            os.sched_setaffinity(0, before)
    if as_json:
        out(json.dumps(as_dict(cells, latencies)))
    else:
        show(cells, latencies)


def as_dict(cells: Sequence[Cell], latencies: dict[str, Latency]) -> dict[str, object]:
    """The document that `--json` prints."""
    return {
        "results": [
            {field.name: getattr(cell, field.name) for field in fields(Cell)} for cell in cells
        ],
        "raise_to_post_us": {
            name: {field.name: getattr(latency, field.name) for field in fields(Latency)}
            for name, latency in latencies.items()
        },
    }


def geometric_mean(values: Sequence[float]) -> float:
    return exp(fsum(map(log, values)) / len(values))


def show(cells: Sequence[Cell], latencies: dict[str, Latency]) -> None:
    console = Console()
    table = Table(title="paged writes, GB/s")
    for name in ("provider", "pattern", "page", "core", "bare, 1 page", "bare, best", "ratio"):
        table.add_column(name, justify="left" if name in ("provider", "pattern") else "right")
    for cell in cells:
        table.add_row(
            cell.provider,
            cell.pattern,
            f"{cell.page_bytes >> 10} KiB",
            f"{cell.gbytes_per_s:.2f}",
            f"{cell.raw_one_page_gbytes_per_s:.2f}",
            f"{cell.raw_best_gbytes_per_s:.2f}",
            f"{cell.ratio:.2f} [{cell.ratio_q1:.2f}–{cell.ratio_q3:.2f}]",
        )
    console.print(table)
    for provider in dict.fromkeys(cell.provider for cell in cells):
        ratios = [c.ratio for c in cells if c.provider == provider and c.pattern == "scattered"]
        if ratios:
            console.print(
                f"{provider}, scattered: geometric mean of the ratios "
                f"{geometric_mean(ratios):.3f}, least {min(ratios):.3f}"
            )
    table = Table(title="raise to post, µs")
    for name in ("mode", *(field.name for field in fields(Latency))):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, latency in latencies.items():
        table.add_row(mode, *(f"{getattr(latency, f.name):.2f}" for f in fields(Latency)))
    console.print(table)
