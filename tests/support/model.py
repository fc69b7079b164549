"""The real model of the tests: fetched once into the build folder, offline afterwards."""

from functools import cache
from pathlib import Path

from pdnode.models.fetch import fetch

_CACHE = Path(__file__).resolve().parents[2] / "build"


@cache
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory. `fetch` locks: suites may run at once."""
    return fetch(_CACHE)
