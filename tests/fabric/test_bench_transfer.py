"""`pdnode bench transfer`: a short run of the whole command, and what it does with wrong bytes."""

import json
import subprocess
import sys

import numpy as np
import pytest

from pdnode.bench.latency import summary
from pdnode.bench.node import Order
from pdnode.bench.pair import Pair, cores
from pdnode.bench.plan import PROVIDERS
from pdnode.bench.transfer import Turn, cell_of
from pdnode.errors import PdnodeError
from pdnode.fabric.library import find_library

CELL = {
    "provider", "library", "page_bytes", "pattern", "gbytes_per_s", "raw_one_page_gbytes_per_s",
    "raw_best_gbytes_per_s", "ratio", "ratio_q1", "ratio_q3",
}  # fmt: skip
SIZE_BYTES = 4 << 20


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pdnode", "bench", "transfer", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_a_short_run_prints_every_field() -> None:
    done = bench(
        "--json", "--mib", "4", "--provider", "tcp", "--page-bytes", "16384",
        "--page-bytes", "1048576", "--raises", "40",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"results", "raise_to_post_us"}
    assert [
        (cell["provider"], cell["pattern"], cell["page_bytes"]) for cell in found["results"]
    ] == [
        ("tcp", pattern, page_bytes)
        for pattern in ("scattered", "runs")
        for page_bytes in (16384, 1048576)
    ]
    for cell in found["results"]:
        assert set(cell) == CELL
        assert cell["library"].startswith(("1.", "2."))
        assert cell["raw_one_page_gbytes_per_s"] > 0
        assert 0 < cell["ratio_q1"] <= cell["ratio"] <= cell["ratio_q3"]
        assert cell["gbytes_per_s"] > 0
    assert list(found["raise_to_post_us"]) == ["busy_idle", "busy_loaded", "adaptive"]
    for latency in found["raise_to_post_us"].values():
        assert list(latency) == ["p50", "p99", "p99_9", "max"]
        assert 0 < latency["p50"] <= latency["p99"] <= latency["p99_9"] <= latency["max"]


def test_the_ratio_is_the_median_of_those_within_a_turn() -> None:
    turns = [Turn(1.0, 0.5, 2.0), Turn(3.0, 1.0, 3.0), Turn(4.0, 2.0, 2.0)]
    order = Order(page_bytes=4096, size_bytes=SIZE_BYTES, pattern="scattered", seed=1)
    cell = cell_of(turns, provider="tcp", library="2.0", order=order)
    assert (cell.ratio_q1, cell.ratio, cell.ratio_q3) == (0.75, 1.0, 1.5)
    rates = cell.gbytes_per_s, cell.raw_one_page_gbytes_per_s, cell.raw_best_gbytes_per_s
    assert rates == (3.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--pairs", "8"], "argument --pairs: '8'; allowed: 9 to 1000"),
        (["--page-bytes", "5000"], "invalid choice: 5000"),
        (["--provider", "verbs"], "invalid choice: 'verbs' (choose from"),
        (["--mib", "2000"], "argument --mib: '2000'; allowed: 4 to 1024"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], text: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 64
    assert text in done.stderr


def test_orders_cover_every_page_once() -> None:
    for pattern, run_pages in (("scattered", 1), ("runs", 64)):
        order = Order(page_bytes=16384, size_bytes=SIZE_BYTES, pattern=pattern, seed=1)
        assert order.run_pages == run_pages
        source, target = order.pages()
        everything = np.arange(256)
        assert np.array_equal(np.sort(source), everything)
        assert np.array_equal(np.sort(target), everything)
        assert sum(span[2] for span in order.spans()) == 256
        if pattern == "scattered":
            assert not np.array_equal(source, target)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_wrong_bytes_are_found(provider: str) -> None:
    """The target compares with what the sender's memory holds at the start."""
    order = Order(page_bytes=16384, size_bytes=SIZE_BYTES, pattern="scattered", seed=3)
    with Pair(
        library=str(find_library("auto", provider)),
        provider=provider,
        size_bytes=SIZE_BYTES,
        poll="adaptive",
        cpus=cores(),
    ) as pair:
        assert pair.core(order, 2) > 0
        assert pair.bare(order, 2, window=16, gather=4) > 0
        source, target = order.pages()
        pair.node.memory[int(source[7]) * 16384 + 5] ^= 1
        with pytest.raises(PdnodeError, match=f"page {target[7]} of 16384 bytes differs"):
            pair.core(order, 1)
        with pytest.raises(PdnodeError, match=f"page {target[7]} of 16384 bytes differs"):
            pair.bare(order, 1, window=16, gather=1)


def test_latencies_are_microseconds() -> None:
    found = summary([1000 * n for n in range(1, 1001)])
    assert (found.p50, found.p99, found.p99_9, found.max) == (500.5, 990.01, 999.001, 1000.0)
