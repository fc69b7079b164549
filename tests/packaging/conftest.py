import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout with what `make dist` has built, which runs these tests."""
    if "PDNODE_DIST" not in os.environ:
        pytest.skip("`make dist` runs this")
    return Path(__file__).resolve().parents[2]
