"""Nodes whose KV pages are in the "device" memory of the stub of the CUDA driver.

Real daemons, workers and cuda-python, with a model on the CPU that asks the stub for its way into
the memory (`CumemRegion.map`). The NICs of `cumem` are the fake libfabric's, which connects nothing
beyond its process: there all nodes are in one.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from tests.fabric.native_build import build_fake
from tests.support.cuda_stub import ROOT, environment
from tests.support.nodes import STOP_TIMEOUT_S, Client, NodeSpec, RunningNode, clients


@contextlib.asynccontextmanager
async def ready(
    specs: Sequence[NodeSpec], running: Sequence[RunningNode]
) -> AsyncIterator[list[Client]]:
    """Clients of nodes that are ready; at the end none of them holds a page."""
    async with clients(*specs) as found:
        for client, node in zip(found, running, strict=True):
            await client.wait_ready(node)
        yield found
        for client in found:
            await client.wait_no_pages()


def staged(folder: Path) -> dict[str, object]:
    """Of NodeSpec, for nodes over tcp; the stub of each process reports into `folder`."""
    folder.mkdir()
    return {"kv": {"region": "staged"}, "env": environment(STUB_CUDA_REPORT=str(folder))}


def stub_reports(folder: Path) -> tuple[list[str], list[str]]:
    """What the stub has to say of each daemon, and of each worker."""
    found = [path.read_text() for path in sorted(folder.iterdir())]
    workers = [text for text in found if "pdnode.engine.worker" in text]
    return [text for text in found if text not in workers], workers


def check_stub_reports(folder: Path, *, workers: int) -> None:
    """Nobody did what a driver refuses. What a worker has left goes with its process."""
    daemons, found = stub_reports(folder)
    assert len(found) == workers
    assert not [text for text in daemons + found if "violation" in text]
    left = [line.split() for text in daemons for line in text.splitlines() if "left " in line]
    assert {count for _, _, count in left} <= {"0"}, left


def cumem(personality: str, **settings: str) -> dict[str, object]:
    """Of NodeSpec, for `one_process`. `personality`: of the fake, verbs or efa; `settings`: of the
    stub."""
    return {
        "kv": {"region": "cumem"},
        "env": environment(**settings) | {"FAKE_FABRIC": f"{personality},segments=4"},
        "provider": personality,
        "fabric": {"library": str(build_fake())},
        "nic": {"name": personality, "address": "127.0.0.1"},
    }


@contextlib.contextmanager
def one_process(specs: Sequence[NodeSpec], report: Path) -> Iterator[list[RunningNode]]:
    """The nodes in one process, named once for each of them; ends them as SIGTERM does."""
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
    running = [RunningNode(spec, process, log, 0) for spec in specs]
    try:
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, running[0].text()
    finally:
        process.kill()
        process.wait()


def check_report(report: Path, *, registrations: int) -> None:
    """Nothing was violated, nothing is left, and pages were registered by dma-buf: so often."""
    found: dict[str, object] = json.loads(report.read_text())
    by_dma_buf = found.pop("by_dma_buf")
    assert by_dma_buf == registrations
    assert found == {
        "codes": [0] * len(found["codes"]),  # type: ignore[arg-type]
        "fake_violations": [],
        "registrations": 0,
        "stub_violations": [],
        "live": {},
    }
