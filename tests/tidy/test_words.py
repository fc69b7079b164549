"""What must not stand in the repository: package-registry hosts, paths of one machine, secrets."""

import re

import pytest

from tests.tidy.repository import files, read

# Written in pieces, so that this file does not find itself.
FORBIDDEN = {
    "package registry": r"\b(py" + r"pi\.org|python" + r"hosted\.org|download\.py" + r"torch\.org)",
    "model hub": r"\bhugging" + r"face\.co\b",
    "package mirror": r"\b(--(extra-)?index-" + r"url|find-" + r"links)\s*[= ]\s*\S*(//|/)",
    "path of a machine": r"(?<![\w.])/(wo" + r"rk/|ro" + r"ot/|ho" + r"me/\w|opt/py" + r"pi)",
    "private key": "-----BEGIN " + "[A-Z ]*PRIVATE KEY",
}
TEXT = {
    ".py", ".pyi", ".cpp", ".hpp", ".h", ".c", ".md", ".toml", ".txt", ".sh", ".cfg", ".json",
    ".service", ".conf", ".rules", ".yml", ".yaml", "",
}  # fmt: skip


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nowhere_in_the_repository(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{path}:{number}: {line.strip()[:80]}"
        for path in files()
        if path.suffix in TEXT
        for number, line in enumerate(read(path).splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []
