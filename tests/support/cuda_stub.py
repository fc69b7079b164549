"""Processes with cuda-python on a CUDA driver without a GPU (tests/memory/stub_cuda).

cuda-python is no dependency of the project's environment: it goes into a folder under build/ that
only these processes have on their path.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BINDINGS = "cuda-bindings==12.9.5"
INSTALL_S = 300.0
RUN_S = 60.0
_SOURCES = ROOT / "tests/memory/stub_cuda"


def bindings() -> Path:
    """The folder with cuda-python."""
    return fetched(BINDINGS)


def fetched(package: str) -> Path:
    """A folder with a package; skips the test, in a line, where it cannot be fetched."""
    if problem := _fetch(package):
        pytest.skip(f"{package} cannot be fetched: {problem}")
    return _folder(package)


def _folder(package: str) -> Path:
    return ROOT / "build" / package.replace("==", "-")


@functools.cache
def _fetch(package: str) -> str:
    """Why it is not there; tried once."""
    folder = _folder(package)
    if folder.is_dir():
        return ""
    fresh = folder.with_suffix(f".{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(fresh), package]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        problem = f"not within {INSTALL_S:g} s"
    else:
        if done.returncode == 0:
            fresh.rename(folder)
            return ""
        problem = done.stderr.strip().rpartition("\n")[2]
    shutil.rmtree(fresh, ignore_errors=True)
    return problem


@functools.cache
def stub() -> Path:
    """The folder with the stub, `libcuda.so.1`."""
    folder = ROOT / "build" / "stub-cuda"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    sources = sorted(_SOURCES.glob("*.c"))
    newest = max(source.stat().st_mtime for source in _SOURCES.iterdir())
    if not library.exists() or library.stat().st_mtime < newest:
        fresh = folder / f"fresh.{os.getpid()}"
        flags = ["-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
        command = ["cc", *flags, "-o", str(fresh), *map(str, sources), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        fresh.rename(library)
    return folder


def environment(**settings: str) -> dict[str, str]:
    """Variables under which a process finds both. `settings`: of the stub, STUB_CUDA_…"""
    return {"PYTHONPATH": str(bindings()), "LD_LIBRARY_PATH": str(stub()), **settings}


def run_python(
    *arguments: str, variables: Mapping[str, str], timeout_s: float = RUN_S
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | dict(variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Stub:
    """The stub of this process, which must have been started with `environment`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.stub_violations.restype = ctypes.c_char_p
        self._library.stub_live.restype = ctypes.c_int64
        self._library.stub_copied_bytes.restype = ctypes.c_int64

    def violations(self) -> list[str]:
        return self._library.stub_violations().decode().splitlines()

    def live(self) -> dict[str, int]:
        """Objects that are there, by kind; kinds without any are left out."""
        kinds = ("memory", "ranges", "host", "contexts", "streams")
        counts = {kind: self._library.stub_live(kind.encode()) for kind in kinds}
        return {kind: count for kind, count in counts.items() if count}

    def copied_bytes(self) -> int:
        return self._library.stub_copied_bytes()
