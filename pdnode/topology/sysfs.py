"""Reads a tree laid out as /sys is. Every file may be missing or fail: that is "unknown"."""

import os
import re
from pathlib import Path

LIVE = Path("/sys")
MAX_FILE_BYTES = 1 << 16
MAX_ENTRIES = 1 << 16
_DIGITS = re.compile(r"(\d+)")


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]


class Sysfs:
    """`root` stands for /sys; what the kernel shows under /proc is looked for beside it."""

    def __init__(self, root: Path = LIVE) -> None:
        self.root = root
        self.proc = root.parent / "proc"

    @property
    def live(self) -> bool:
        """Whether this is the running kernel's tree and not a copy of another machine's."""
        return self.root == LIVE

    def text(self, *parts: str) -> str | None:
        """A file without the white space around it; None if unreadable, empty or not text."""
        return read_text(self.root.joinpath(*parts))

    def integer(self, *parts: str) -> int | None:
        """A decimal or 0x number; None for anything else, such as "N/A (no PMA)"."""
        return parse_integer(self.text(*parts))

    def names(self, *parts: str) -> list[str]:
        """Entries of a folder in natural order; none if it cannot be read."""
        try:
            found = os.listdir(self.root.joinpath(*parts))
        except OSError:
            return []
        return sorted(found, key=natural)[:MAX_ENTRIES]

    def exists(self, *parts: str) -> bool:
        return os.path.lexists(self.root.joinpath(*parts))

    def link(self, *parts: str) -> tuple[str, ...]:
        """Components of the text of a link, which may dangle; () if it is none."""
        try:
            return Path(os.readlink(self.root.joinpath(*parts))).parts
        except OSError:
            return ()


def parse_integer(text: str | None) -> int | None:
    try:
        return int(text or "", 16 if (text or "").startswith("0x") else 10)
    except ValueError:
        return None


def read_text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode().strip() or None
    except (OSError, UnicodeDecodeError):
        return None
