"""`pdnode bench step`: runs to its end, and says what it ran."""

import json

import pytest

from pdnode.cli import main
from pdnode.errors import Exit


def test_both_kinds_of_pass_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    # More passes than the prompts of one round have chunks: prefill must be fed again.
    assert main(["bench", "step", "--requests", "3", "--passes", "40", "--json"]) == Exit.OK
    report = json.loads(capsys.readouterr().out)
    assert (report.pop("requests"), report.pop("passes")) == (3, 40)
    assert report.keys() == {"decode", "prefill", "streams", "tick"}
    for took in report.values():
        assert 0 < took["p50"] <= took["p99"] <= took["max"]


def test_the_table_names_what_was_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--requests", "1", "--passes", "2"]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 requests, 2 passes"
    assert [line[:12] for line in lines[2:]] == [
        "between two ", "between two ", "streams take", "messenger's "
    ]  # fmt: skip


def test_more_requests_than_immediates_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "step", "--requests", "4096"])
    assert ended.value.code == Exit.USAGE
    assert "allowed: 1 to 4095" in capsys.readouterr().err
