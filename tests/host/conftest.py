"""Fixtures of the tests that start nodes."""

from pathlib import Path

import pytest

from tests.support.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose pages of 32 tokens have 64 KiB a layer."""
    return write_tiny_llama(tmp_path_factory.mktemp("wide"), heads=8, head_dim=64, kv_heads=4)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of about 0.3 M parameters with a byte-level tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))
