"""A whole cluster, seed by seed; and proof that the promises would notice what is broken."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.sim.campaign import Report, campaign, corpus, find_plant, run_seeds
from tests.sim.cluster import MIN_FAULTS, MIN_REQUESTS, run
from tests.sim.plants import PLANTS
from tests.sim.unreachable import contradictions

FULL_RUNS = 1000
RUNS = int(os.environ.get("PDNODE_SIM_RUNS", FULL_RUNS))  # fewer in `make check`
PLANT_SEED = 1_000_000
MOST_SEEDS = 500


@pytest.mark.timeout(600)
def test_no_seed_breaks_a_promise() -> None:
    total = Report()
    for report in campaign([*corpus(), *range(RUNS)]):
        total.add(report)
    assert total.failures == []
    assert total.seeds >= RUNS
    assert contradictions(total.cells) == []
    assert total.requests >= MIN_REQUESTS * RUNS
    assert total.returns >= RUNS // 10
    assert sum(total.faults.values()) >= MIN_FAULTS * RUNS


def test_one_seed_is_always_the_same_run() -> None:
    assert run_seeds([7, 8]) == run_seeds([7, 8])


def test_without_faults_every_request_is_answered() -> None:
    for seed in range(10):
        result = run(seed, faults=False)
        assert result.outcomes == {"length": result.requests}


@pytest.mark.skipif(RUNS < FULL_RUNS, reason="make test looks for the planted faults")
@pytest.mark.timeout(600)
def test_every_planted_fault_is_found() -> None:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        jobs = {name: pool.submit(find_plant, name, PLANT_SEED, 1, MOST_SEEDS) for name in PLANTS}
        needed = {name: job.result() for name, job in jobs.items()}
    assert [name for name, seeds in needed.items() if not seeds] == []
