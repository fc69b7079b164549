"""PagePool: states, counts, fit, misuse."""

import pytest

from pdnode.core.pages import PageCounts, PagePool
from pdnode.types import Run, count_pages


def test_a_page_list_goes_through_its_states() -> None:
    pool = PagePool(10)
    runs = pool.reserve(4)
    assert runs == (Run(0, 4),)
    assert pool.counts == PageCounts(free=6, reserved=4, used=0, cached=0, quarantined=0)
    pool.activate((Run(0, 3),))
    assert pool.counts == PageCounts(free=6, reserved=1, used=3, cached=0, quarantined=0)
    pool.quarantine((Run(2, 2),))
    assert pool.counts == PageCounts(free=6, reserved=0, used=2, cached=0, quarantined=2)
    assert not pool.can_reserve(7), "quarantined pages are not free"
    pool.release(runs)
    assert pool.counts == PageCounts(free=10, reserved=0, used=0, cached=0, quarantined=0)
    assert pool.reserve(10) == (Run(0, 10),), "what was released has merged again"


def test_zero_pages_are_a_normal_case() -> None:
    pool = PagePool(0)
    assert pool.can_reserve(0)
    assert not pool.can_reserve(1)
    assert pool.reserve(0) == ()
    pool.release(())
    assert pool.counts == PageCounts(0, 0, 0, 0, 0)


def pool_with_free(pages: int, *free: Run) -> PagePool:
    """A pool in which all but the `free` runs is reserved."""
    pool = PagePool(pages)
    pool.reserve(pages)
    pool.release(free)
    return pool


def test_best_fit_leaves_long_runs_alone() -> None:
    pool = pool_with_free(40, Run(0, 10), Run(20, 4), Run(30, 3))
    assert pool.reserve(4) == (Run(20, 4),)
    assert pool.reserve(2) == (Run(30, 2),)
    assert pool.reserve(4) == (Run(0, 4),)


def test_what_fits_nowhere_comes_in_as_few_runs_as_can_be() -> None:
    pool = pool_with_free(40, Run(0, 10), Run(20, 4), Run(30, 3))
    assert pool.reserve(13) == (Run(0, 10), Run(30, 3)), "longest first, then best fit"
    assert pool.counts.free == 4


def test_pages_merge_with_both_neighbours() -> None:
    pool = PagePool(9)
    pool.reserve(9)
    for run in (Run(0, 3), Run(6, 3), Run(3, 3)):
        pool.release((run,))
    assert pool.reserve(9) == (Run(0, 9),)


def test_a_shared_page_is_free_after_its_last_release() -> None:
    pool = PagePool(8)
    runs = pool.reserve(6)
    pool.activate(runs)
    pool.share((Run(1, 2),))
    pool.share((Run(2, 1),))
    pool.release(runs)
    assert pool.counts == PageCounts(free=6, reserved=0, used=2, cached=0, quarantined=0)
    pool.release((Run(1, 2),))
    assert pool.counts.used == 1
    with pytest.raises(AssertionError, match="free"):
        pool.release((Run(1, 1),))
    pool.release((Run(2, 1),))
    assert pool.counts.free == 8
    assert pool.reserve(8) == (Run(0, 8),)


def test_a_release_ends_with_a_shared_page() -> None:
    pool = PagePool(4)
    runs = pool.reserve(4)
    pool.activate(runs)
    pool.share((Run(0, 1), Run(3, 1)))
    pool.release(runs)
    assert pool.counts == PageCounts(free=2, reserved=0, used=2, cached=0, quarantined=0)
    assert pool.reserve(2) == (Run(1, 2),)


def test_misuse_is_an_assertion_and_changes_nothing() -> None:
    pool = PagePool(10)
    pool.reserve(6)
    pool.activate((Run(0, 2),))
    pool.quarantine((Run(2, 2),))
    before = pool.counts  # 0, 1 used · 2, 3 quarantined · 4, 5 reserved · 6 … 9 free
    for misuse, run in [
        (pool.activate, Run(0, 1)),  # twice
        (pool.activate, Run(2, 1)),  # a peer may still write
        (pool.activate, Run(6, 1)),
        (pool.quarantine, Run(2, 1)),  # twice
        (pool.quarantine, Run(5, 2)),  # half of it free
        (pool.share, Run(4, 1)),
        (pool.share, Run(2, 1)),
        (pool.share, Run(6, 1)),
        (pool.release, Run(6, 1)),  # twice
        (pool.release, Run(5, 2)),
        (pool.release, Run(9, 2)),  # beyond the pool
        (pool.release, Run(-1, 2)),
        (pool.release, Run(0, 0)),
    ]:
        with pytest.raises(AssertionError):
            misuse((run,))
        assert pool.counts == before, (misuse, run)
    with pytest.raises(AssertionError, match="5 pages wanted, 4 are free"):
        pool.reserve(5)
    with pytest.raises(AssertionError):
        pool.can_reserve(-1)


def test_release_twice_in_one_call_is_caught() -> None:
    pool = PagePool(4)
    pool.reserve(4)
    with pytest.raises(AssertionError, match="free"):
        pool.release((Run(0, 2), Run(1, 2)))


def test_single_pages_all_over_the_pool() -> None:
    pool = PagePool(4096)
    pages = [run for _ in range(4096) for run in pool.reserve(1)]
    pool.release(tuple(run for run in pages if run.start % 2))
    runs = pool.reserve(2048)
    assert sorted(runs) == [Run(page, 1) for page in range(1, 4096, 2)]
    pool.release(runs)
    pool.release(tuple(run for run in pages if run.start % 2 == 0))
    assert count_pages(pool.reserve(4096)) == 4096
