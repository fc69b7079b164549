"""The wheel, in a clean venv; it was built from the sdist."""

import json
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.model import smollm2_dir

pytestmark = pytest.mark.timeout(300)


def only(root: Path, pattern: str) -> Path:
    (found,) = (root / "dist").glob(pattern)
    return found


def pdnode(root: Path, folder: Path, *arguments: str) -> str:
    """What its entry point prints, from elsewhere, without the checkout on any path."""
    done = subprocess.run(
        [str(root / "build" / "dist" / "venv" / "bin" / "pdnode"), *arguments],
        cwd=folder, env={"TMPDIR": str(folder)}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sdist_has_all_that_is_needed_to_go_on(root: Path) -> None:
    with tarfile.open(only(root, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in (
        "pyproject.toml", "CMakeLists.txt", "Makefile", "pdnode/fabric/native/module.cpp",
        "tui/pdnode_tui/app.py", "tests/packaging/test_wheel.py", "packaging/launcher.cpp",
    ):  # fmt: skip
        assert wanted in names
    assert [name for name in names if name.startswith(("build/", ".venv/", "dist/"))] == []


def test_the_wheel_has_the_programs_and_no_sources_of_theirs(root: Path) -> None:
    with zipfile.ZipFile(only(root, "*.whl")) as archive:
        names = archive.namelist()
    assert [name for name in names if name.endswith((".cpp", ".hpp", ".c"))] == []
    assert any(name.startswith("pdnode/fabric/_native.") for name in names)
    assert {"pdnode/bench/_raw_loop.so", "pdnode_tui/app.py"} <= set(names)
    assert [name for name in names if name.startswith("tests/")] == []


def test_the_wheel_brings_its_libfabric(root: Path, tmp_path: Path) -> None:
    version = json.loads(pdnode(root, tmp_path, "version", "--json"))
    major, minor = map(int, version["libfabric"].split("."))
    assert (major, minor) >= (1, 18)


def test_the_wheel_answers(root: Path, tmp_path: Path) -> None:
    said = pdnode(root, tmp_path, "demo", "--model", str(smollm2_dir()), "--json")
    report = json.loads(said)
    assert "Paris" in report["answer"]
    assert report["prefill"] == "demo-prefill"
