"""Whole nodes whose KV pages are in "device" memory: the tokens of the ordinary parity test.

Real daemons, workers and cuda-python, with a model on the CPU that asks the stub of the driver for
its way into the memory (`CumemRegion.map`). Only `[kv] region` differs from the test on memfd.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.test_node_parity import GRID_TOKENS, check_all
from tests.fabric.native_build import BUILD_S, build_fake
from tests.support.cuda_stub import ROOT, environment
from tests.support.model import smollm2_dir
from tests.support.nodes import (
    STOP_TIMEOUT_S,
    Client,
    NodeSpec,
    RunningNode,
    clients,
    nodes,
    until,
)
from tests.support.reference import load_reference

SIZES = (1, 2, 17, 65, 197)
CHUNK = 64
GPUS = ("0000:1a:00.0", "1")

pytestmark = pytest.mark.timeout(900 + BUILD_S)


def pair(folder: Path, variables: Mapping[str, str], **keys: object) -> tuple[NodeSpec, NodeSpec]:
    """A prefill and a decode node, each with its GPU; `keys`: more of NodeSpec's."""
    specs: list[NodeSpec] = []
    for name, role, gpu in zip(("pf", "dc"), ("prefill", "decode"), GPUS, strict=True):
        engine = {"chunk_tokens": CHUNK, "gpus": [gpu]}
        spec = NodeSpec(name, role, smollm2_dir(), folder, tuple(specs), engine=engine, **keys)
        spec.env = variables
        specs.append(spec)
    return specs[0], specs[1]


@contextlib.asynccontextmanager
async def ready(
    specs: tuple[NodeSpec, ...], running: list[RunningNode]
) -> AsyncIterator[list[Client]]:
    async with clients(*specs) as found:
        for client, node in zip(found, running, strict=True):
            await client.wait_ready(node)
        yield found
        for client in found:
            await client.wait_no_pages()


async def check_parity(decode: Client) -> None:
    grid = load_reference().grid
    await check_all(decode, [(grid[size], GRID_TOKENS) for size in SIZES])


def stub_reports(folder: Path) -> tuple[list[str], list[str]]:
    """What the stub said at the end of each daemon, and of each worker."""
    found = [path.read_text() for path in sorted(folder.iterdir())]
    workers = [text for text in found if "pdnode.engine.worker" in text]
    return [text for text in found if text not in workers], workers


def staged_pages(metrics: Mapping[str, float]) -> tuple[float, float]:
    """(stored, fetched)"""
    page_bytes = 30 * 3 * 64 * 2 * 4 * 16  # layers, KV heads, head size, K and V, float32, tokens
    name = 'pdnode_kv_staged_bytes_total{direction="%s"}'
    return metrics[name % "stored"] / page_bytes, metrics[name % "fetched"] / page_bytes


async def test_staged_over_tcp(tmp_path: Path) -> None:
    """Each page of a prompt is copied once on each side, and nothing else is. Digests are of the
    mirrors."""
    folder = tmp_path / "stub"
    folder.mkdir()
    variables = environment(STUB_CUDA_REPORT=str(folder))
    specs = pair(tmp_path, variables, kv={"region": "staged"}, peer={"verify": "twice"})
    with nodes(*specs) as running:
        async with ready(specs, running) as (prefill, decode):
            await check_parity(decode)
            pages = sum(-(-(size - 1) // 16) for size in SIZES)
            shown = await decode.metrics()
            assert staged_pages(await prefill.metrics()) == (pages, 0)
            assert staged_pages(shown) == (0, pages)
            assert shown['pdnode_warning{code="W140",severity="warning"}'] == 1
    daemons, workers = stub_reports(folder)
    assert len(workers) == 2
    assert not [text for text in daemons + workers if "violation" in text]


@contextlib.contextmanager
def one_process(specs: tuple[NodeSpec, ...], report: Path) -> Iterator[list[RunningNode]]:
    """The nodes in one process, once for each of them."""
    folder = specs[0].folder
    paths = []
    for spec in specs:
        paths.append(folder / f"{spec.name}.toml")
        paths[-1].write_text(spec.toml())
    log = folder / "nodes.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.one_process", str(report), *map(str, paths)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=os.environ | dict(specs[0].env),
        )
    try:
        yield [RunningNode(spec, process, log, 0) for spec in specs]
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()


def cumem_pair(folder: Path, personality: str) -> tuple[NodeSpec, NodeSpec]:
    variables = environment() | {"FAKE_FABRIC": f"{personality},segments=4"}
    return pair(
        folder,
        variables,
        kv={"region": "cumem"},
        provider=personality,
        fabric={"library": str(build_fake())},
        nic={"name": personality, "address": "127.0.0.1"},
    )


def check_report(report: Path) -> None:
    """Nothing was violated, nothing is left, and the pages were registered by dma-buf."""
    found = json.loads(report.read_text())
    assert found.pop("by_dma_buf") >= 2
    assert found == {
        "codes": [0, 0],
        "fake_violations": [],
        "registrations": 0,
        "stub_violations": [],
        "live": {},
    }


@pytest.mark.parametrize("personality", ["verbs", "efa"])
async def test_cumem_on_the_fake_libfabric(tmp_path: Path, personality: str) -> None:
    """The daemon never touches the pages: the stub would end it with SIGSEGV."""
    specs = cumem_pair(tmp_path, personality)
    report = tmp_path / "report"
    with one_process(specs, report) as running:
        async with ready(specs, running) as (_, decode):
            await check_parity(decode)
    assert report.exists(), running[0].text()
    check_report(report)


async def test_a_killed_worker_leaves_no_memory(tmp_path: Path) -> None:
    """Its daemon lets go of the mapping, and another engine follows."""
    specs = cumem_pair(tmp_path, "verbs")
    report = tmp_path / "report"
    with one_process(specs, report) as running:
        async with ready(specs, running) as (_, decode):
            workers = running[0].children()
            assert len(workers) == 2
            os.kill(workers[1], signal.SIGKILL)
            await until(lambda: "another engine" in running[0].text(), "the engine restarts", 60)
            await until(lambda: len(running[0].children()) == 2, "both workers run", 60)
            await decode.wait_ready(running[1])
            await check_parity(decode)
    check_report(report)
