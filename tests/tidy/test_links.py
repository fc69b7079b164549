"""Links between the documents lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

from tests.tidy.repository import ROOT, files, read

DOCUMENTS = [path for path in files() if path.suffix == ".md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in LINK.findall(read(path)):
        target, _, anchor = link.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        found = (ROOT / path.parent / target).resolve() if target else ROOT / path
        if not found.exists() or (anchor and anchor not in anchors(found.read_text())):
            broken.append(link)
    assert broken == []
