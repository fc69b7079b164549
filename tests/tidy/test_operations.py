"""docs/operations.md lists exactly the event codes that the source can log."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pdnode import errors
from tests.tidy.repository import ROOT

CODE = re.compile(r"[a-z]+\.[a-z_]+|log_held_back")
LOGGING = {"event", "fault", "_tell", "_log"}  # calls that take a code
# Built at run time: f"peer.{state}" of messenger/peer_records.py.
BUILT = {"peer.connecting", "peer.refused", "peer.lost"}


def logged(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            values: list[ast.expr] = node.args[:3] if name in LOGGING else []
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
            named = target.attr if isinstance(target, ast.Attribute) else None
            named = target.id if isinstance(target, ast.Name) else named
            values = [node.value] if named == "code" else []
        else:
            continue
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def test_every_event_is_listed_and_every_listed_event_exists() -> None:
    found = set(BUILT)
    for path in Path(ROOT, "pdnode").rglob("*.py"):
        found |= {text for text in logged(ast.parse(path.read_text())) if CODE.fullmatch(text)}
    text = (ROOT / "docs" / "operations.md").read_text().partition("## Events")[2]
    listed = re.findall(r"^\| `([^`]+)` \| (?:debug|info|warning|error) \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == found


def test_every_exit_code_and_every_error_that_is_not_the_clients_is_explained() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    _, _, section = text.partition("\n## Exit codes and errors\n")
    section, _, _ = section.partition("\n## ")
    exits = [int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)]
    assert exits == sorted(code.value for code in errors.Exit)
    causes = [errors.Cause, *errors.Cause.__subclasses__()]
    wanted = {
        (kind.code, kind.status)
        for kind in causes
        if kind.status >= 500 or kind in (errors.QueueFull, errors.Cancelled)
    }
    listed = re.findall(r"^\| `(\w+)` \| (\d+) \|", section, re.MULTILINE)
    assert {(code, int(status)) for code, status in listed} == wanted
