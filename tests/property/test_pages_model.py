"""PagePool against a naive model: one set of pages per state, one count of references per page."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdnode.core.pages import PagePool
from pdnode.types import Run, expand_runs


def runs_of(pages: set[int]) -> list[Run]:
    """Maximal runs, in order."""
    found: list[Run] = []
    for page in sorted(pages):
        if found and found[-1].start + found[-1].count == page:
            found[-1] = Run(found[-1].start, found[-1].count + 1)
        else:
            found.append(Run(page, 1))
    return found


def fewest_runs(lengths: list[int], count: int) -> int:
    """How many of the free runs are needed for `count` pages: the longest ones."""
    needed = 0
    for length in sorted(lengths, reverse=True):
        if count <= 0:
            break
        count -= length
        needed += 1
    return needed


class PagesMachine(RuleBasedStateMachine):
    @initialize(pages=st.integers(0, 60))
    def start(self, pages: int) -> None:
        self.pages = pages
        self.pool = PagePool(pages)
        self.free = set(range(pages))
        self.reserved: set[int] = set()
        self.used: set[int] = set()
        self.quarantined: set[int] = set()
        self.references: Counter[int] = Counter()

    def some(self, data: st.DataObject, pages: set[int]) -> tuple[Run, ...]:
        """Any part of `pages`, as runs in any order, not always maximal."""
        chosen = data.draw(st.sets(st.sampled_from(sorted(pages)), min_size=1))
        runs = runs_of(chosen)
        if data.draw(st.booleans()):
            runs = [Run(page, 1) for page in sorted(chosen)]
        return tuple(data.draw(st.permutations(runs)))

    @rule(count=st.integers(0, 30))
    def reserve(self, count: int) -> None:
        assert self.pool.can_reserve(count) == (count <= len(self.free))
        if count > len(self.free):
            with pytest.raises(AssertionError):
                self.pool.reserve(count)
            return
        lengths = [run.count for run in runs_of(self.free)]
        got = self.pool.reserve(count)
        pages = expand_runs(got)
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= self.free
        assert len(got) == fewest_runs(lengths, count)
        if len(got) == 1:
            from_run = next(r for r in runs_of(self.free) if 0 <= got[0].start - r.start < r.count)
            assert from_run.count == min(length for length in lengths if length >= count)
        self.free -= set(pages)
        self.reserved |= set(pages)
        self.references.update(pages)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        runs = self.some(data, self.reserved)
        self.pool.activate(runs)
        self.reserved -= set(expand_runs(runs))
        self.used |= set(expand_runs(runs))

    @precondition(lambda self: self.reserved | self.used)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        runs = self.some(data, self.reserved | self.used)
        self.pool.quarantine(runs)
        pages = set(expand_runs(runs))
        self.reserved -= pages
        self.used -= pages
        self.quarantined |= pages

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        runs = self.some(data, self.used)
        self.pool.share(runs)
        self.references.update(expand_runs(runs))

    @precondition(lambda self: len(self.free) < self.pages)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        runs = self.some(data, set(range(self.pages)) - self.free)
        self.pool.release(runs)
        for page in expand_runs(runs):
            self.references[page] -= 1
            if not self.references[page]:
                for state in (self.reserved, self.used, self.quarantined):
                    state.discard(page)
                self.free.add(page)

    @rule(page=st.integers(-1, 60))
    def misuse(self, page: int) -> None:
        """Whatever the model does not allow is an assertion and changes nothing."""
        run = (Run(page, 1),)
        for allowed, call in (
            (self.reserved, self.pool.activate),
            (self.reserved | self.used, self.pool.quarantine),
            (self.used, self.pool.share),
            (set(range(self.pages)) - self.free, self.pool.release),
        ):
            if page not in allowed:
                with pytest.raises(AssertionError):
                    call(run)

    @invariant()
    def counts_agree(self) -> None:
        counts = self.pool.counts
        assert counts == (
            len(self.free),
            len(self.reserved),
            len(self.used),
            0,
            len(self.quarantined),
        )
        assert sum(counts) == self.pages

    def teardown(self) -> None:
        """Everything goes back, and the pool is one run again."""
        if not hasattr(self, "pool"):
            return
        for page, references in self.references.items():
            for _ in range(references):
                self.pool.release((Run(page, 1),))
        assert self.pool.counts == (self.pages, 0, 0, 0, 0)
        if self.pages:
            assert self.pool.reserve(self.pages) == (Run(0, self.pages),)


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=100, stateful_step_count=40)
