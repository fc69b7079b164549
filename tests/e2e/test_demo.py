"""`pdnode demo` from outside: what it prints, and that it leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nodes import shared_memory

LAYERS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 4, 2, 16, 16  # of the tiny model, and the default
PAGE_BYTES = KV_HEADS * 2 * PAGE_TOKENS * HEAD_DIM * 4

pytestmark = pytest.mark.timeout(300)


def demo(model: Path, temporary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdnode", "demo", "--model", str(model), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"TMPDIR": str(temporary), "COLUMNS": "100"},
    )


def test_json_report(tiny_model: Path, tmp_path: Path) -> None:
    before = shared_memory()
    done = demo(tiny_model, tmp_path, "--json", "--prompt", "moo " * 40, "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["prompt"] == "moo " * 40
    assert report["prefill"] == "demo-prefill"
    assert 1 <= report["output_tokens"] <= 12
    pages = -(-(report["prompt_tokens"] - 1) // PAGE_TOKENS)
    assert pages > 5
    assert report["kv_bytes"] == pages * LAYERS * PAGE_BYTES
    assert LAYERS <= report["writes"] <= pages * LAYERS
    assert report["pages_per_write"] == pytest.approx(pages * LAYERS / report["writes"])
    phases = ("queue_ms", "prefill_ms", "transfer_wait_ms", "first_step_ms")
    for name in (*phases, "token_ms"):
        assert report[name] >= 0, name
    assert report["prefill_ms"] > 0
    assert sum(report[name] for name in phases) == pytest.approx(report["ttft_ms"], abs=1)
    assert list(tmp_path.iterdir()) == []
    assert shared_memory() == before


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    done = demo(tmp_path / "nowhere", tmp_path)
    assert done.returncode == 69
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
