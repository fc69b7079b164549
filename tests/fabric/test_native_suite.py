"""The core's own suite (C++) on the fake libfabric: seeds, sanitizers, planted faults.

`pdnode_native_test` runs exchanges and faults under the rules of "an EFA", "a verbs NIC" and
"something worse"; every byte is checked and every count exact. PDNODE_SANITIZE=thread runs it under
the thread sanitizer (`make tsan`).
"""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pdnode.fabric.library import find_library
from tests.fabric.native_build import BUILD_S, build
from tests.fabric.native_plants import PLANTS, Plant

SANITIZERS = os.environ.get("PDNODE_SANITIZE", "address,undefined")
SEEDS = 200
RUN_S = 300.0

pytestmark = pytest.mark.timeout(BUILD_S + RUN_S)


@pytest.fixture(scope="session")
def built() -> Path:
    return build(SANITIZERS)


def run(
    binary: Path, library: Path, personality: str, seeds: int, first: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(
        [binary, library, personality, str(first), str(seeds)],
        env={**os.environ, **options, **variables},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


@pytest.mark.parametrize("personality", ["efa", "verbs", "worse"])
def test_every_seed_passes(built: Path, personality: str) -> None:
    """In two processes: much of the time is waiting, for a silent device for example."""

    def half(first: int) -> "subprocess.CompletedProcess[str]":
        library = built / "libfabric_fake.so"
        return run(built / "pdnode_native_test", library, personality, SEEDS // 2, first)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(half, (0, SEEDS // 2)):
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout == f"{personality}: {SEEDS // 2} seeds passed\n"


@pytest.mark.parametrize("personality", ["efa", "verbs"])
def test_a_library_without_dma_buf_never_sees_one(built: Path, personality: str) -> None:
    library = built / "libfabric_fake.so"
    done = run(built / "pdnode_native_test", library, personality, 3, FAKE_FABRIC_MINOR="18")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("provider", ["tcp", "tcp-rdm"])
def test_the_same_exchanges_over_a_real_library(built: Path, provider: str) -> None:
    library = find_library("auto", provider)
    # Leaks of the library itself are none of ours.
    options = {"ASAN_OPTIONS": "detect_leaks=0"}
    done = run(built / "pdnode_native_test", library, provider, 10, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def found(built: Path) -> Iterator[dict[int, "Future[subprocess.CompletedProcess[str]]"]]:
    """By number of the plant; several at a time, because a fault is often found by waiting."""

    def look(plant: Plant) -> "subprocess.CompletedProcess[str]":
        return run(
            built / "pdnode_planted_test",
            built / "libfabric_fake.so",
            plant.personality,
            plant.seeds,
            plant.first,
            PDNODE_PLANT=str(plant.number),
            PDNODE_TEST_PATIENCE_MS="3000",
        )

    with ThreadPoolExecutor(3) as pool:
        yield {plant.number: pool.submit(look, plant) for plant in PLANTS}


@pytest.mark.skipif(SANITIZERS == "thread", reason="planted faults: with address, undefined")
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.number}-{plant.name}")
def test_a_planted_fault_is_found(
    found: "dict[int, Future[subprocess.CompletedProcess[str]]]", plant: Plant
) -> None:
    done = found[plant.number].result()
    assert done.returncode != 0, f"{plant.name} was not found by {plant.seeds} seeds"


@pytest.mark.skipif(SANITIZERS == "thread", reason="planted faults: with address, undefined")
def test_without_a_fault_the_planted_build_passes(built: Path) -> None:
    for personality in ("efa", "verbs", "worse"):
        done = run(built / "pdnode_planted_test", built / "libfabric_fake.so", personality, 20)
        assert done.returncode == 0, done.stdout + done.stderr
