"""The table of `pdnode bench serve --compare`, and what is counted as others' work."""

import json
import os
import time

import pytest

from pdnode.bench import busy, compare_report
from pdnode.bench.busy import OthersMeter
from pdnode.bench.compare import HALF, SPLIT, Comparison, Variant
from pdnode.bench.figures import Quantiles

FOUND = Comparison(
    prompt_tokens=2000,
    background_streams=4,
    rounds=3,
    dtype="float32",
    variants=[
        Variant(HALF, "0", 512, Quantiles(4.5, 5, 5, 6), None, None, None, None, {}),
        Variant(
            SPLIT, "0 + 1", 512, Quantiles(4.75, 5, 5, 6), Quantiles(0.04, 0.05, 0.06, 0.07),
            Quantiles(0.05, 0.06, 0.09, 0.1), Quantiles(5, 5, 5, 5), 1.5, {"timeout": 1},
        ),
    ],
    ttft_minus_s={HALF: 0.25},
    load_average=1.26,
    others_ratio=0.125,
)  # fmt: skip


def test_the_table_is_in_milliseconds_and_says_how_busy_the_host_was() -> None:
    lines = compare_report.as_table(FOUND).splitlines()
    assert "3 rounds, float32; load average before: 1.3" in lines[0]
    assert "other processes meanwhile: 12%" in lines[0]
    half, split = lines[4:6]
    assert half == f"| {HALF} | 0 | 4,500 | 6,000 | - | - | - | - | - | - | - |"
    assert split == f"| {SPLIT} | 0 + 1 | 4,750 | 6,000 | 40 | 60 | 50 | 90 | 100 | 1.50 | 5,000 |"
    assert lines[-2] == f"TTFT, {SPLIT} minus {HALF}: +250 ms"
    assert lines[-1] == f"{SPLIT}: failed requests: timeout 1"
    columns = [line.count("|") for line in lines[2:6]]
    assert columns == [12] * 4


def test_json_has_every_figure() -> None:
    found = json.loads(compare_report.as_json(FOUND))
    assert found["variants"][1]["loaded_itl_s"]["p99"] == 0.09
    assert found["ttft_minus_s"] == {HALF: 0.25}


def test_others_are_all_but_this_process_and_those_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = (1000, 5000)
    processes = {os.getpid(): 100, 7: 50, 8: 10}
    monkeypatch.setattr(busy, "_cores_ticks", lambda _: cores)
    monkeypatch.setattr(busy, "_process_ticks", processes.__getitem__)
    monkeypatch.setattr(busy, "_children", {os.getpid(): [], 7: [8]}.__getitem__)
    ours, others = OthersMeter([7], [0, 1]), OthersMeter([], [0, 1])
    cores = (1600, 6000)
    processes.update({os.getpid(): 200, 7: 250, 8: 110})
    assert ours.ratio() == 0.2  # 600 of 1,000 ticks were busy, 400 of them ours
    assert others.ratio() == 0.5
    processes[7] = 5000  # the two files are not read at one moment
    assert ours.ratio() == 0.0


def test_a_process_that_computes_is_seen_to_compute() -> None:
    before = busy._process_ticks(os.getpid())
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass
    assert busy._process_ticks(os.getpid()) - before >= 10  # of 10 ms each
    assert busy._process_ticks(2**22 + 1) == 0  # gone
    worked, total = busy._cores_ticks(sorted(os.sched_getaffinity(0)))
    assert 0 < worked < total
