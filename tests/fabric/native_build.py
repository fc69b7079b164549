"""Builds the core's own suite and the fake libfabric with CMake, under sanitizers."""

import subprocess
import sys
from pathlib import Path

from tests.fabric.native_plants import write_planted

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
BUILD_S = 1500.0
"""About two minutes of processor time, the first time."""


def build(sanitizers: str) -> Path:
    """The folder with `libfabric_fake.so`, `pdnode_native_test` and `pdnode_planted_test`."""
    planted = ROOT / "build" / "native-planted"
    write_planted(planted)
    # Unoptimized with -fsanitize=address: it compiles in less than half of the time.
    flags = "-O1 -g1 -Wno-tsan" if sanitizers == "thread" else "-O0 -g1"
    options = [f"-DPDNODE_SANITIZE={sanitizers}", f"-DPDNODE_PLANTED={planted}"]
    return _cmake(f"native-{sanitizers.replace(',', '-')}", flags, options, "all")


def build_fake() -> Path:
    """`libfabric_fake.so` without sanitizers, for a Python process."""
    return _cmake("native-plain", "-O1", [], "fabric_fake") / "libfabric_fake.so"


def _cmake(name: str, flags: str, options: list[str], target: str) -> Path:
    folder = ROOT / "build" / name
    configure = [
        BIN / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}", "-DCMAKE_BUILD_TYPE=None",
        f"-DCMAKE_CXX_FLAGS={flags}", "-DPDNODE_NATIVE_TEST=ON", *options,
    ]  # fmt: skip
    for command in (configure, [BIN / "cmake", "--build", folder, "--target", target]):
        run = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    return folder
