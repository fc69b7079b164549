"""Which libfabric to load: one per process, by absolute path. Loads and imports nothing native.

The core checks the version and refuses what is older than 1.18 in words.
"""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pdnode.errors import DeviceMissing

SONAME = "libfabric.so.1"
MINIMUM = (1, 18)
EFA_DIRECTORIES = (Path("/opt/amazon/efa/lib64"), Path("/opt/amazon/efa/lib"))
SYSTEM_DIRECTORIES = (
    Path("/usr/local/lib"),
    Path("/usr/lib64"),
    Path("/usr/lib/x86_64-linux-gnu"),
    Path("/usr/lib/aarch64-linux-gnu"),
)
WHEEL = "mpich"
BUNDLED = Path(__file__).parent / "lib" / SONAME  # where packaging/pdnode.spec puts it

# libfabric's real file name carries its ABI age, `libfabric.so.1.AGE.x`: 20 in 1.17 (Debian), 29 in
# 2.3, one more with each of the nine releases from one to the other. So 1.18 has 21.
_FIRST_SUFFICIENT_AGE = 21


def find_library(configured: str, provider: str) -> Path:
    """Path of the libfabric to load for `[fabric] library` and `[fabric] provider`.

    `"auto"`: EFA's own directory (for `efa`), the system's if it is new enough, else the one that
    came with the program: in the wheel `mpich`, or in the single file. Raises DeviceMissing with
    everything that was tried.
    """
    if configured != "auto":
        path = Path(configured)
        if not path.is_absolute():
            raise DeviceMissing(f"[fabric] library: {configured!r} is not an absolute path")
        if not path.is_file():
            raise DeviceMissing(f"[fabric] library: there is no file {configured}")
        return path
    tried = []
    candidates: list[Path] = [*(EFA_DIRECTORIES if provider == "efa" else ()), *SYSTEM_DIRECTORIES]
    for directory in candidates:
        path = directory / SONAME
        if not path.is_file():
            continue
        if directory in EFA_DIRECTORIES or is_new_enough(path):
            return path
        tried.append(f"{path} is older than {MINIMUM[0]}.{MINIMUM[1]}")
    came_along = BUNDLED if BUNDLED.is_file() else find_in_wheel()
    if came_along is not None:
        return came_along
    tried.append(f"the Python package {WHEEL} is not installed (pip install 'pdnode[libfabric]')")
    raise DeviceMissing(
        "[fabric] library: no libfabric found: "
        + "; ".join(tried)
        + ". Install one or name it by its absolute path."
    )


def is_new_enough(path: Path) -> bool:
    """Whether the file name behind the link `path` is that of libfabric 1.18 or newer.

    Asked before loading, because a library cannot be unloaded. An unknown form of the name passes:
    the core looks at the real version.
    """
    found = re.fullmatch(r"libfabric\.so\.1\.(\d+)\.\d+", path.resolve().name)
    return found is None or int(found.group(1)) >= _FIRST_SUFFICIENT_AGE


def find_in_wheel() -> Path | None:
    """libfabric in the wheel `mpich`, found by its file list."""
    try:
        files = distribution(WHEEL).files
    except PackageNotFoundError:
        return None
    for file in files or ():
        if file.name == SONAME:
            path: Path = Path(str(file.locate())).resolve()
            if path.is_file():
                return path
    return None
