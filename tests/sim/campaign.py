"""Many seeds on all cores: what failed, what happened, and where the machines have been."""

import gc
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from tests.sim.cluster import run
from tests.sim.kernel import Failure
from tests.sim.plants import planted
from tests.sim.table import Cell, counted

CORPUS = Path(__file__).parent / "corpus.txt"
BATCH = 25
MOST_FAILURES = 20  # then a campaign ends: the rest would only say the same


@dataclass(slots=True)
class Report:
    """Of some seeds. `failures`: (seed, what broke)."""

    seeds: int = 0
    requests: int = 0
    returns: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    cells: Counter[Cell] = field(default_factory=Counter)
    cpu_s: float = field(default=0.0, compare=False)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        self.seeds += other.seeds
        self.requests += other.requests
        self.returns += other.returns
        self.outcomes += other.outcomes
        self.faults += other.faults
        self.cells += other.cells
        self.cpu_s += other.cpu_s
        self.failures += other.failures


def failure_of(seed: int, report: Report | None = None) -> str | None:
    """Runs one seed; what broke, or None."""
    try:
        result = run(seed)
    except (Exception, Failure) as error:  # noqa: BLE001 - whatever it is, the seed is bad
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if report is not None:
        report.requests += result.requests
        report.returns += result.returns
        report.outcomes += result.outcomes
        report.faults += result.faults
    return None


def run_seeds(seeds: list[int]) -> Report:
    report = Report()
    begun_s = time.process_time()
    with counted(report.cells):
        for seed in seeds:
            report.seeds += 1
            broken = failure_of(seed, report)
            if broken is not None:
                report.failures.append((seed, broken))
    gc.collect()
    report.cpu_s = time.process_time() - begun_s
    return report


def find_plant(name: str, first_seed: int, wanted: int, most: int) -> list[int]:
    """Seeds needed to find the planted fault `name`, `wanted` times, each within `most` seeds."""
    needed: list[int] = []
    seed = first_seed
    with planted(name):
        while len(needed) < wanted:
            tried = next((n for n in range(most) if failure_of(seed + n) is not None), None)
            if tried is None:
                return needed
            needed.append(tried + 1)
            seed += tried + 1
    gc.collect()
    return needed


def campaign(seeds: Iterable[int], jobs: int = 0) -> Iterator[Report]:
    """Reports of batches, as they come. `jobs` 0: one process a core."""
    listed = list(seeds)
    batches = [listed[start : start + BATCH] for start in range(0, len(listed), BATCH)]
    jobs = jobs or os.cpu_count() or 1
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        failures = 0
        waiting = [pool.submit(run_seeds, batch) for batch in batches]
        for done in as_completed(waiting):
            report = done.result()
            failures += len(report.failures)
            yield report
            if failures >= MOST_FAILURES:
                pool.shutdown(cancel_futures=True)
                return


def corpus() -> list[int]:
    """Seeds that once failed: they are run first, for ever."""
    lines = CORPUS.read_text().splitlines()
    return [int(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]


def keep(seed: int, text: str) -> None:
    """A failing seed goes to the corpus."""
    if seed not in corpus():
        with CORPUS.open("a") as file:
            file.write(f"{seed}  # {text}\n")
