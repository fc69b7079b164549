"""What the tidy tests look at: the files of the repository, as git sees them."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def files() -> tuple[Path, ...]:
    """Every file that is tracked or would be, relative to the root; ignored ones are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True, timeout=30,
    ).stdout.decode()  # fmt: skip
    return tuple(
        path for path in map(Path, sorted(filter(None, listed.split("\0"))))
        if (ROOT / path).is_file()
    )  # fmt: skip


def python_files() -> list[Path]:
    return [path for path in files() if path.suffix == ".py"]


def read(path: Path) -> str:
    return (ROOT / path).read_text()
