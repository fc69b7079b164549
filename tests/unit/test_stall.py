"""A connection is stalled when its writes stay out and none comes back."""

from pdnode.messenger.stall import StallWatch


def row(*, writes: int, done: int = 0, failed: int = 0, session: int = 1) -> dict[str, int]:
    return {
        "session": session,
        "local_nic": 0,
        "remote_nic": 2,
        "writes": writes,
        "done_writes": done,
        "failed_writes": failed,
    }


STALLED = [(1, (0, 2))]


def test_writes_that_stay_out_are_named_once() -> None:
    watch = StallWatch(3.0)
    assert watch.check([row(writes=4, done=7)], 10.0) == []
    assert watch.check([row(writes=4, done=7)], 12.9) == []
    assert watch.check([row(writes=4, done=7)], 13.0) == STALLED
    assert watch.check([row(writes=4, done=7)], 20.0) == []


def test_every_write_that_comes_back_is_progress() -> None:
    watch = StallWatch(3.0)
    for second in range(20):
        assert watch.check([row(writes=4, done=second)], float(second)) == []
    assert watch.check([row(writes=4, done=19, failed=1)], 21.0) == []
    assert watch.check([row(writes=4, done=19, failed=1)], 24.0) == STALLED


def test_an_idle_connection_never_stalls() -> None:
    watch = StallWatch(3.0)
    assert watch.check([row(writes=0, done=5)], 0.0) == []
    assert watch.check([row(writes=0, done=5)], 100.0) == []
    assert watch.check([row(writes=1, done=5)], 101.0) == [], "it has work only since now"
    assert watch.check([row(writes=1, done=5)], 103.5) == STALLED


def test_a_stall_that_ended_can_come_again() -> None:
    watch = StallWatch(1.0)
    watch.check([row(writes=1)], 0.0)
    assert watch.check([row(writes=1)], 1.0) == STALLED
    assert watch.check([row(writes=1, done=1)], 2.0) == []
    assert watch.check([row(writes=1, done=1)], 3.0) == STALLED


def test_connections_are_told_apart_and_forgotten() -> None:
    watch = StallWatch(1.0)
    both = [row(writes=1), row(writes=1, session=2)]
    watch.check(both, 0.0)
    assert watch.check(both, 1.0) == [*STALLED, (2, (0, 2))]
    assert watch.check([], 2.0) == []
    assert watch.check(both, 3.0) == [], "known for the first time again"
