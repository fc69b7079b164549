"""`python -m tests.sim --seed 0 --runs 1000`: what `make sim` runs. Exit 1 if a seed fails."""

import argparse
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context

from tests.sim.campaign import Report, campaign, corpus, find_plant, keep
from tests.sim.plants import PLANTS
from tests.sim.table import lines
from tests.sim.unreachable import UNREACHABLE, contradictions, thin

COUNTED_RUNS = 20_000  # from so many on, every reachable cell must have been reached
PLANT_SEED = 1_000_000
WANTED, MOST = 5, 500


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def seeds(first: int, runs: int) -> int:
    """Runs the corpus and then `runs` seeds; the number of faults found."""
    begun = time.monotonic()
    total = Report()
    for report in campaign(chain(corpus(), range(first, first + runs))):
        total.add(report)
        for seed, text in report.failures:
            say(f"seed {seed} failed: {text}   (make sim SEED={seed} RUNS=1)")
            keep(seed, text)
    taken_s = time.monotonic() - begun
    for line in lines(total.cells):
        say(line)
    say("\nwhat cannot be reached, and why:")
    for (machine, state, event), why in UNREACHABLE.items():
        say(f"  {machine} {state} × {event}: {why}")
    say(f"\noutcomes: {dict(total.outcomes.most_common())}")
    say(f"faults: {dict(total.faults.most_common())}")
    wrong = contradictions(total.cells)
    rare = thin(total.cells)
    for text in (*wrong, *rare):
        say(f"  {text}")
    say(
        f"{total.seeds} seeds, {total.requests} requests, {sum(total.faults.values())} faults, "
        f"{total.returns} NIC pairs back, "
        f"{taken_s:.0f} s, {total.seeds / taken_s:.1f} seeds/s, {total.cpu_s:.0f} s of CPU, "
        f"{len(total.failures)} failed"
    )
    return len(total.failures) + len(wrong) + (len(rare) if runs >= COUNTED_RUNS else 0)


def plants() -> int:
    """Looks for every planted fault; the number of those that were not found."""
    missed = 0
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        jobs = {name: pool.submit(find_plant, name, PLANT_SEED, WANTED, MOST) for name in PLANTS}
        for name, job in jobs.items():
            needed = job.result()
            found = f"median {statistics.median(needed):5.0f} seeds" if needed else "NOT FOUND"
            say(f"{name:45} {found}  {needed}")
            missed += len(needed) < WANTED
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sim")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--plants", action="store_true", help="look for the planted faults instead")
    options = parser.parse_args()
    return int(bool(plants() if options.plants else seeds(options.seed, options.runs)))


if __name__ == "__main__":
    sys.exit(main())
