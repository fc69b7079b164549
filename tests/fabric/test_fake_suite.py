"""The Python tests of the core once more, each personality of the fake libfabric in its process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fabric.native_build import BUILD_S, build_fake

HERE = Path(__file__).parent
RUN_S = 200.0

pytestmark = pytest.mark.timeout(BUILD_S + RUN_S)


@pytest.fixture(scope="session")
def fake() -> Path:
    return build_fake()


# Four segments, because the tests count writes.
@pytest.mark.parametrize(
    ("rules", "device", "chosen", "files"),
    [
        ("efa,segments=4", "efa", "rdm", ("data", "counting", "transfers", "layer_programs")),
        ("verbs,segments=4", "verbs", "not rdm", ("data", "counting", "layer_programs")),
        ("worse,segments=4,never_blocks=0", "", "", ("data", "groups")),
    ],
    ids=["efa", "verbs", "worse"],
)
def test_the_core_passes_on(
    fake: Path, rules: str, device: str, chosen: str, files: tuple[str, ...]
) -> None:
    variables = {
        "FAKE_FABRIC": rules,
        "PDNODE_TEST_LIBRARY": str(fake),
        "PDNODE_TEST_DEVICE": device,
    }
    paths = [HERE / f"test_{name}.py" for name in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-k", chosen, *paths],
        cwd=HERE.parents[1],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


def test_other_threads_go_on_while_a_provider_pins(fake: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fabric.slow_registration", fake],
        cwd=HERE.parents[1],
        env={**os.environ, "FAKE_FABRIC": "verbs"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.stdout == "0\n", done.stderr
