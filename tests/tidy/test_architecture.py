"""ARCHITECTURE.md names every package, and every module of the core."""

import re

from tests.tidy.repository import ROOT, python_files

TABLE = (ROOT / "ARCHITECTURE.md").read_text().partition("## Modules")[2].partition("\n## ")[0]


def test_every_package_has_a_row() -> None:
    packages = {path.parts[1] for path in python_files() if path.parts[0] == "pdnode"}
    packages = {name for name in packages if not name.endswith(".py")}
    rows = set(
        re.findall(r"`([a-z]+)[`/]", "".join(re.findall(r"^\|[^|]*\|", TABLE, re.MULTILINE)))
    )
    assert sorted(packages - rows) == []


def test_every_module_of_the_core_is_named() -> None:
    modules = {path.stem for path in python_files() if path.parts[:2] == ("pdnode", "core")}
    named = set(re.findall(r"`(?:core/)?([a-z_]+)`", TABLE))
    assert sorted(modules - named - {"__init__"}) == []
