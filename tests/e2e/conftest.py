"""Fixtures of the end-to-end tests: models on disk, and pairs of real nodes."""

from pathlib import Path

import pytest

from tests.support.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of about 0.3 M parameters with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(path)
    return path
