"""The record of a slow transfer: which layers of which chunk, in µs from its start."""

from pdnode.obs.records import LayerTimes, TransferRecord, wire_s
from pdnode.obs.slow import layer_marks, slow_transfer


def record(*rows: LayerTimes) -> TransferRecord:
    return TransferRecord("k", "req", "dc", "drained", 40, 3, 99, 4, 0.1, 0.2, 0.5, rows)


def test_the_last_chunk_is_shown_layer_by_layer() -> None:
    found = record(
        LayerTimes(0, 0, 500, 600, 9_000, 10, 1),
        LayerTimes(1, 1, 4_000_000, 4_010_000, 4_500_000, 10, 1),
        LayerTimes(1, 0, 1_000_000, 1_002_000, 1_900_000, 10, 1),
        LayerTimes(1, 0, 1_000_000, 1_001_000, 2_000_000, 10, 1),  # another route
    )
    marks = [(one.layer, one.raised_us, one.posted_us, one.done_us) for one in layer_marks(found)]
    assert marks == [(0, 0, 1, 1000), (1, 3000, 3010, 3500)]
    assert wire_s(found) == 1e-9 * (4_500_000 - 600)


def test_what_did_not_happen_is_none_and_not_0() -> None:
    found = record(
        LayerTimes(0, 0, 1_000, 2_000, 3_000, 10, 1),
        LayerTimes(0, 1, 5_000, 0, 0, 0, 0),
        LayerTimes(0, 2, 0, 0, 0, 0, 0),
    )
    marks = [(one.raised_us, one.posted_us, one.done_us) for one in layer_marks(found)]
    assert marks == [(0, 1, 2), (4, None, None), (None, None, None)]
    assert layer_marks(record()) == ()
    assert wire_s(record()) is None


def test_a_slow_transfer_says_how_it_ended() -> None:
    found = slow_transfer(record(LayerTimes(0, 0, 1_000, 2_000, 8_002_000, 10, 1)), 0.008)
    assert (found.request_id, found.peer, found.outcome) == ("req", "dc", "done")
    assert (found.total_s, found.bytes, found.pages) == (0.008, 99, 3)
    assert found.phases is not None
    assert (found.phases.prefill_queue_s, found.phases.prefill_s) == (0.1, 0.2)
    assert found.phases.ttft_s is None
    assert slow_transfer(record(), None).total_s == 0.5
