"""Fixtures of the end-to-end tests: models on disk, and nodes that several modules ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nodes import NodeSpec, RunningNode, nodes
from tests.support.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of about 0.3 M parameters with a byte-level tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that takes a second or more for 2,000 tokens: time to do something in it."""
    return write_tiny_llama(tmp_path_factory.mktemp("slow"), heads=8, head_dim=64, kv_heads=4)


@pytest.fixture(scope="session")
def trio(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningNode]]:
    """A prefill, a decode (never local) and a colocated node for tests that leave them as found."""
    folder = tmp_path_factory.mktemp("trio")
    engine = {"chunk_tokens": 64}
    prefill = NodeSpec("pf", "prefill", tiny_model, folder, engine=engine)
    decode = NodeSpec("dc", "decode", tiny_model, folder, (prefill,), engine=engine)
    colocated = NodeSpec("co", "colocated", tiny_model, folder, engine=engine)
    with nodes(prefill, decode, colocated) as running:
        yield running
