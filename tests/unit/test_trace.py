"""Trace contexts that are taken, and those that are not."""

import pytest

from pdnode.obs.trace import checked_traceparent, trace_id

GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_good_one_is_passed_on_as_it_came() -> None:
    assert checked_traceparent(GOOD) == GOOD
    assert trace_id(GOOD) == "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    "header",
    [
        "",
        GOOD.upper(),
        GOOD + "-more",
        GOOD + "\n",
        GOOD.replace("00-4", "ff-4"),
        GOOD.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        GOOD.replace("00f067aa0ba902b7", "0" * 16),
        GOOD[:-1],
    ],
)
def test_a_bad_one_is_as_if_it_had_not_been_sent(header: str) -> None:
    assert checked_traceparent(header) == ""
    assert trace_id(header) is None
