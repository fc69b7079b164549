"""The tree drawn in the README is the real one."""

import re
from pathlib import Path

from tests.tidy.repository import ROOT, files

NO_SUFFIX = {"LICENSE", "Makefile"}
_PATH = re.compile(r"[\w.*\-]+(/[\w.*\-]+)*/?")


def is_path(word: str) -> bool:
    """`core/`, `cli.py`, `tui/pdnode_tui`, `.ci/`, `LICENSE`; not a word of a description."""
    if not _PATH.fullmatch(word):
        return False
    return "/" in word or word in NO_SUFFIX or re.fullmatch(r"[\w*\-]+\.[a-z]+", word) is not None


def drawn(text: str) -> list[Path]:
    """Paths in the ```text block whose first line is "tree"; a name may be a pattern.

    A line is some names, then what they are for; a deeper line is in the folder above it.
    """
    block = re.search(r"^```text\ntree\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block, 'README.md has no ```text block with "tree" as its first line'
    paths: list[Path] = []
    parents: list[tuple[int, Path]] = []
    for line in block[1].splitlines():
        indent = len(line) - len(line.lstrip())
        while parents and parents[-1][0] >= indent:
            parents.pop()
        base = parents[-1][1] if parents else Path()
        folder = None
        for word in line.split():
            if not is_path(word):
                break
            paths.append(base / word)
            folder = base / word if word.endswith("/") or "." not in word else folder
        if folder is not None:
            parents.append((indent, folder))
    return paths


def test_reads_a_tree() -> None:
    text = "```text\ntree\nREADME.md  Makefile\npdnode/\n  cli.py config*.py  e.g. main\n"
    text += "  core/   pure. x/y\n    pages.py  runs\ntui/pdnode_tui console\ntests/  unit\n```\n"
    assert [str(path) for path in drawn(text)] == [
        "README.md", "Makefile", "pdnode", "pdnode/cli.py", "pdnode/config*.py",
        "pdnode/core", "pdnode/core/pages.py", "tui/pdnode_tui", "tests",
    ]  # fmt: skip


def test_everything_drawn_is_there() -> None:
    named = drawn((ROOT / "README.md").read_text())
    assert [str(path) for path in named if not any(ROOT.glob(str(path)))] == []


def test_every_folder_and_package_is_drawn() -> None:
    named = set(drawn((ROOT / "README.md").read_text()))
    named |= {parent for path in named for parent in path.parents}
    wanted = {Path(path.parts[0]) for path in files() if len(path.parts) > 1}
    wanted |= {path.parent for path in files() if path.name == "__init__.py" and
               path.parts[0] in ("pdnode", "tui") and len(path.parts) == 3}  # fmt: skip
    assert sorted(map(str, wanted - named)) == []
