"""`pdnode bench plan`: plans what it says that it plans."""

import json

import pytest

from pdnode.cli import main
from pdnode.errors import Exit

PAGES = 8192


def test_runs_and_single_pages_of_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--rounds", "2", "--json"]) == Exit.OK
    report = json.loads(capsys.readouterr().out)
    assert (report["prompt_tokens"], report["layers"], report["ranks"]) == (131_072, 80, [8, 8])
    assert 0 <= report["growth_mib"] < 64
    found = {
        (one["kind"], one["pages"]): (one["programs"], one["spans"]) for one in report["results"]
    }
    # A rank's heads go to its like; a latent goes to every rank, an eighth of the pages from each.
    assert found == {
        ("gqa", "run"): (8, 8),
        ("gqa", "single"): (8, 8 * PAGES),
        ("mla", "run"): (64, 64),
        ("mla", "single"): (64, 8 * PAGES),
    }
    assert all(0 < one["p50_ms"] <= one["p99_ms"] for one in report["results"])


def test_the_table_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--rounds", "2"]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    kinds = [line.split()[:2] for line in lines[2:6]]
    assert kinds == [["gqa", "run"], ["gqa", "single"], ["mla", "run"], ["mla", "single"]]
