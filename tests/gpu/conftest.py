"""Checks that need a GPU: skipped, with the reason, where there is none. `tests/gpu/run.sh`."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pdnode.engine.device import missing_for_cuda

Report = Callable[[str, float, str], None]
_FIGURES: list[tuple[str, float, str]] = []
_OUTCOMES: dict[str, str] = {}


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """A GPU with all that the CUDA engine needs."""
    if text := missing_for_cuda():
        pytest.skip(text)


@pytest.fixture
def report() -> Report:
    """Puts a figure (name, value, unit) into the report."""
    return lambda name, value, unit: _FIGURES.append((name, value, unit))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        text = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2]
        _OUTCOMES[report.nodeid.rpartition("/")[2]] = text


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("on this GPU")
    for name, outcome in _OUTCOMES.items():
        terminalreporter.write_line(f"{name:70} {outcome.splitlines()[0]}")
    for name, value, unit in _FIGURES:
        terminalreporter.write_line(f"{name:70} {value:12.1f} {unit}")
    if path := os.environ.get("PDNODE_GPU_REPORT"):
        figures = [{"name": n, "value": value, "unit": unit} for n, value, unit in _FIGURES]
        whole = {"host": _host(), "checks": _OUTCOMES, "figures": figures}
        Path(path).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _host() -> dict[str, str]:
    """What the figures were measured on; empty without a GPU."""
    if missing_for_cuda():
        return {}
    import flashinfer
    import torch

    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "flashinfer": flashinfer.__version__,
    }
