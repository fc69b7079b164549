"""Fixtures of the service tests: models on disk, and a socket that plays the supervisor."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.supervisor import Listening
from tests.support.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of about 0.3 M parameters with a byte-level tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that takes a second or more for 2,000 tokens: time to do something in it."""
    return write_tiny_llama(tmp_path_factory.mktemp("slow"), heads=8, head_dim=64, kv_heads=4)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Listening]:
    with Listening(tmp_path / "notify") as found:
        yield found
