"""docs/page-lifetime.md names tests that exist, and some for every row."""

import ast
import re

from tests.tidy.repository import ROOT

NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
ROWS = 10


def test_every_named_test_exists() -> None:
    text = (ROOT / "docs" / "page-lifetime.md").read_text()
    rows = [line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == ROWS
    missing = []
    for row in rows:
        named = NAMED.findall(row)
        assert named, row
        for path, test in named:
            tree = ast.parse((ROOT / path).read_text())
            names = {getattr(node, "name", "") for node in ast.walk(tree)}
            if test and test not in names:
                missing.append(f"{path}::{test}")
    assert missing == []
