"""What a process must never have imported, looked up in its sys.modules."""

import subprocess
import sys

import pytest

from tests.tidy.repository import ROOT


def loaded_by(module: str) -> set[str]:
    script = f"import sys, {module}\nprint(*sorted(sys.modules), sep=chr(10))"
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("heavy", ["torch", "transformers"])
def test_the_daemon_process_never_imports(heavy: str) -> None:
    assert heavy not in loaded_by("pdnode.daemon.node")


def test_the_core_needs_nothing_but_msgspec() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "pdnode" / "core").glob("*.py"))
        if path.name != "__init__.py"
    ]
    found = loaded_by(", ".join(modules))
    assert not found & {"torch", "numpy", "aiohttp", "asyncio", "socket", "random"}
    ours = {name for name in found if name.startswith("pdnode.")}
    assert {n for n in ours if not n.startswith("pdnode.core")} <= {"pdnode.types", "pdnode.errors"}
