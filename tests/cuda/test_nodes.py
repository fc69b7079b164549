"""The ordinary parity test on "device" memory: only `[kv] region` differs from the one on memfd."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.test_node_parity import GRID_TOKENS, check_all
from tests.fabric.native_build import BUILD_S
from tests.support.device_nodes import (
    check_report,
    check_stub_reports,
    cumem,
    one_process,
    ready,
    staged,
    stub_reports,
)
from tests.support.model import smollm2_dir
from tests.support.nodes import Client, NodeSpec, nodes
from tests.support.reference import load_reference

SIZES = (1, 2, 17, 65, 197)
CHUNK = 64

pytestmark = pytest.mark.timeout(900 + BUILD_S)


def pair(folder: Path, keys: Mapping[str, object]) -> tuple[NodeSpec, NodeSpec]:
    """A prefill and a decode node, each with a GPU of its own."""
    model = smollm2_dir()
    engines = [{"chunk_tokens": CHUNK, "gpus": [gpu]} for gpu in ("0000:1a:00.0", "1")]
    prefill = NodeSpec("pf", "prefill", model, folder, engine=engines[0], **keys)
    return prefill, NodeSpec("dc", "decode", model, folder, (prefill,), engine=engines[1], **keys)


async def check_parity(decode: Client) -> None:
    grid = load_reference().grid
    await check_all(decode, [(grid[size], GRID_TOKENS) for size in SIZES])


def staged_pages(metrics: Mapping[str, float]) -> tuple[float, float]:
    """(stored, fetched)"""
    page_bytes = 30 * 3 * 64 * 2 * 4 * 16  # layers, KV heads, head size, K and V, float32, tokens
    name = 'pdnode_kv_staged_bytes_total{direction="%s"}'
    return metrics[name % "stored"] / page_bytes, metrics[name % "fetched"] / page_bytes


async def test_staged_over_tcp(tmp_path: Path) -> None:
    """Each page of a prompt is copied once on each side, and nothing else is. Digests are of the
    mirrors."""
    reports = tmp_path / "stub"
    specs = pair(tmp_path, staged(reports) | {"peer": {"verify": "twice"}})
    with nodes(*specs) as running:
        async with ready(specs, running) as (prefill, decode):
            await check_parity(decode)
            pages = sum(-(-(size - 1) // 16) for size in SIZES)
            shown = await decode.metrics()
            assert staged_pages(await prefill.metrics()) == (pages, 0)
            assert staged_pages(shown) == (0, pages)
            assert shown['pdnode_kv_pages_verified_total{when="completion"}'] > 0
            assert shown['pdnode_warning{code="W140",severity="warning"}'] == 1
    check_stub_reports(reports, workers=2)


async def test_cumem_on_the_fake_libfabric(tmp_path: Path) -> None:
    """The daemon never touches the pages: the stub would end it with SIGSEGV. These GPUs do not
    order what NICs write: it is flushed once for each prompt that came from the peer."""
    reports, report = tmp_path / "stub", tmp_path / "report"
    reports.mkdir()
    settings = {"STUB_CUDA_REPORT": str(reports), "STUB_CUDA_ORDERING": "0"}
    specs = pair(tmp_path, cumem("verbs", **settings))
    with one_process(specs, report) as running:
        async with ready(specs, running) as (_, decode):
            await check_parity(decode)
    check_report(report, registrations=2)
    _, workers = stub_reports(reports)
    flushes = sorted(text.count("flushed") for text in workers)
    assert flushes[0] == 0
    assert 1 <= flushes[1] <= len(SIZES) - 1  # those that arrive together share a pass
