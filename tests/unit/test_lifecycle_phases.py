"""The daemon's phases, its restarts, and the order of rank of what ends it."""

import pytest

from pdnode.daemon.lifecycle import FORGIVEN_AFTER_S, LONGEST_DELAY_S, Lifecycle, Phase, Restarts
from pdnode.types import Role


def lifecycle(most: int = 5) -> Lifecycle:
    return Lifecycle(Restarts(most))


def test_delays_double_up_to_a_limit_and_end() -> None:
    restarts = Restarts(7)
    assert [restarts.died(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 30, LONGEST_DELAY_S, None]


def test_an_engine_that_served_for_long_is_forgiven() -> None:
    restarts = Restarts(1)
    assert restarts.died(0.0) == 1
    restarts.served(10.0)
    assert restarts.died(10.0 + FORGIVEN_AFTER_S) == 1
    restarts.served(1000.0)
    assert restarts.died(999.0 + FORGIVEN_AFTER_S) is None


def test_no_restart_allowed_means_the_first_death_is_the_last() -> None:
    life = lifecycle(0)
    assert life.engine_died("gone", 0.0, fatal=False)
    assert (life.fatal, life.stopping, life.stop.is_set()) == (True, True, True)


def test_a_death_is_counted_once_and_a_fault_outranks_it() -> None:
    life = lifecycle()
    assert life.engine_died("gone", 0.0, fatal=False)
    assert not life.engine_died("gone again", 0.0, fatal=False)
    assert (life.died, life.fatal, life.delay_s, life.restarts.deaths) == ("gone", False, 1.0, 1)
    assert life.engine_died("internal error", 0.0, fatal=True)
    assert not life.engine_died("too late", 0.0, fatal=True)
    assert (life.died, life.fatal) == ("internal error", True)


def test_after_a_restart_the_next_death_counts_on() -> None:
    life = lifecycle()
    life.engine_died("gone", 0.0, fatal=False)
    life.revived()
    assert life.died is None
    life.engine_died("gone", 0.0, fatal=False)
    assert life.delay_s == 2.0


def test_signals_and_wishes_wake_the_node() -> None:
    life = lifecycle()
    life.want(Role.PREFILL)
    assert life.changed.is_set()
    assert not life.stopping
    life.changed.clear()
    life.signalled()
    assert life.changed.is_set()
    assert life.stopping


def test_phases_are_told_and_only_legal_ones_are_entered() -> None:
    life = lifecycle()
    told: list[Phase] = []
    life.on_phase.append(told.append)
    for phase in (Phase.SERVING, Phase.RESTARTING, Phase.SERVING, Phase.DRAINING, Phase.STOPPED):
        life.enter(phase)
    assert told[-1] is Phase.STOPPED
    assert len(told) == 5
    with pytest.raises(AssertionError, match="stopped → serving"):
        life.enter(Phase.SERVING)
