"""Several GPUs a node, and what is left when one of its workers dies, on a tiny model."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fabric.native_build import BUILD_S
from tests.support.device_nodes import (
    check_report,
    check_stub_reports,
    cumem,
    one_process,
    ready,
    staged,
)
from tests.support.local_engine import LocalEngine, load_model
from tests.support.nodes import Client, NodeSpec, nodes, until
from tests.support.tiny_model import write_tiny_llama

TOKENS = 8
PROMPTS = [[3 + (7 * n + size) % 300 for n in range(size)] for size in (1, 2, 40, 130)]
RESTART_S = 90.0

pytestmark = pytest.mark.timeout(600 + BUILD_S)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    return LocalEngine(load_model(tiny)).generate(PROMPTS, TOKENS)


def node(
    name: str, role: str, model: Path, folder: Path, engine: Mapping[str, object],
    keys: Mapping[str, object], *peers: NodeSpec,
) -> NodeSpec:  # fmt: skip
    chunks = {"chunk_tokens": 32, **engine}
    return NodeSpec(name, role, model, folder, peers, engine=chunks, **keys)


async def check(client: Client, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert await client.tokens(prompt, TOKENS) == tokens, len(prompt)


async def test_staged_ranks(tmp_path: Path, tiny: Path, expected: list[list[int]]) -> None:
    """The leader raises a layer for both ranks: each has its pages in its mirror by then."""
    reports = tmp_path / "stub"
    keys = staged(reports)
    prefill = node("pf", "prefill", tiny, tmp_path, {"tp": 2, "gpus": ["1", "0"]}, keys)
    decode = node("dc", "decode", tiny, tmp_path, {"dp": 2}, keys, prefill)
    specs = (prefill, decode)
    with nodes(*specs) as running:
        async with ready(specs, running) as (_, client):
            await check(client, expected)
    check_stub_reports(reports, workers=4)


async def test_ranks_on_gpus_of_their_own(
    tmp_path: Path, tiny: Path, expected: list[list[int]]
) -> None:
    """Each rank's memory is registered as its GPU's; a colocated node hands its to nobody."""
    keys = cumem("efa")
    prefill = node("pf", "prefill", tiny, tmp_path, {"tp": 2, "gpus": ["1", "0"]}, keys)
    decode = node("dc", "decode", tiny, tmp_path, {"dp": 2}, keys, prefill)
    colocated = node("co", "colocated", tiny, tmp_path, {}, keys)
    specs = (prefill, decode, colocated)
    with one_process(specs, tmp_path / "report") as running:
        async with ready(specs, running) as (_, first, second):
            await check(first, expected)
            await check(second, expected)
    # Of the decode node for itself and, since a fence takes those away, for its peer.
    check_report(tmp_path / "report", registrations=2 + 2 * 2)


async def test_a_killed_worker_leaves_no_memory(
    tmp_path: Path, tiny: Path, expected: list[list[int]]
) -> None:
    """Its daemon lets go of the mapping, and another engine follows."""
    keys = cumem("verbs")
    prefill = node("pf", "prefill", tiny, tmp_path, {"gpus": ["0"]}, keys)
    decode = node("dc", "decode", tiny, tmp_path, {"gpus": ["1"]}, keys, prefill)
    specs = (prefill, decode)
    with one_process(specs, tmp_path / "report") as running:
        async with ready(specs, running) as (_, client):
            workers = running[0].children()
            assert len(workers) == 2
            os.kill(workers[1], signal.SIGKILL)
            await until(lambda: "another engine" in running[0].text(), "a restart", RESTART_S)
            await until(lambda: len(running[0].children()) == 2, "two workers", RESTART_S)
            for one, spec in zip(running, specs, strict=True):
                await Client(client.session, spec).wait_ready(one)
            await check(client, expected)
    check_report(tmp_path / "report", registrations=3)
