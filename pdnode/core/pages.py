"""The page pool: who owns which KV pages, counted exactly by state.

One pool per TP group: a page number means the same page on every rank. Pages are handed out as
runs, because neighbours merge into one larger write (core/plan.py). Not thread safe: the event
loop owns it. Every misuse (double release, a page nobody owns, quarantine twice) is an assertion:
a wrong page list ends as wrong text, so the process must not go on.

    free → reserved → used → free
              ↓         ↓
             quarantined → free

A page granted to a peer is *reserved* until its KV is complete, then *used*. Where the request ends
while the peer may still write, it is *quarantined* until `drained` or a fence (core/transfer.py).
Time alone frees nothing, so quarantined pages bound what can be admitted.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pdnode.types import Run

_FREE, _RESERVED, _USED, _QUARANTINED, _WITHHELD = range(5)
_NAMES = ("free", "reserved", "used", "quarantined", "withheld")

_FROM_FREE = (_FREE,)
_FROM_RESERVED = (_RESERVED,)
_FROM_USED = (_USED,)
_FROM_LIVE = (_RESERVED, _USED)
_FROM_OWNED = (_RESERVED, _USED, _QUARANTINED)


class PageCounts(NamedTuple):
    """Pages by state; the sum is the pool, without what is withheld."""

    free: int
    reserved: int  # granted, KV not complete; never evicted
    used: int
    cached: int  # held by a prefix cache alone; 0 while there is none
    quarantined: int  # request over, a peer may still write


class PagePool:
    """Pages 0 … pages - 1. Costs go by the number of runs, not of pages, unless some are shared.

    `withheld` pages, in rising order, belong to nobody and are not counted.
    """

    def __init__(self, pages: int, withheld: Sequence[int] = ()) -> None:
        assert pages >= 0
        self.withheld = tuple(withheld)
        self._state = bytearray(pages)  # state of each page
        self._counts = [pages - len(withheld), 0, 0, 0]  # pages in each state
        self._shared: dict[int, int] = {}  # references beyond the first
        self._free = _FreeRuns()
        for before, after in pairwise((-1, *withheld, pages)):
            assert before < after, "withheld pages rise"
            if before + 1 < after:
                self._free.put(before + 1, after)
        for page in withheld:
            self._state[page] = _WITHHELD

    @property
    def counts(self) -> PageCounts:
        free, reserved, used, quarantined = self._counts
        return PageCounts(free, reserved, used, 0, quarantined)

    def can_reserve(self, count: int) -> bool:
        """Whether `count` pages are free; for 0 always."""
        assert count >= 0
        return count <= self._counts[_FREE]

    def reserve(self, count: int) -> tuple[Run, ...]:
        """Takes `count` free pages, with one reference, in as few runs as possible.

        Nobody can evict them: they stay until `release`. Ask `can_reserve` first.
        """
        assert self.can_reserve(count), f"{count} pages wanted, {self._counts[_FREE]} are free"
        runs = []
        while count:
            run = self._free.take(count)
            self._move(run, _RESERVED, _FROM_FREE)
            runs.append(run)
            count -= run.count
        return tuple(runs)

    def activate(self, runs: tuple[Run, ...]) -> None:
        """Reserved → used: the KV in them is complete, or is computed here."""
        for run in runs:
            self._move(run, _USED, _FROM_RESERVED)

    def quarantine(self, runs: tuple[Run, ...]) -> None:
        """Reserved or used → quarantined: a peer may still write. Ends with `release`."""
        for run in runs:
            self._move(run, _QUARANTINED, _FROM_LIVE)

    def share(self, runs: tuple[Run, ...]) -> None:
        """One more reference to used pages; each needs a `release` of its own.

        Only used ones: the content of a reserved or quarantined page may still change.
        """
        for run in runs:
            self._move(run, _USED, _FROM_USED)
            for page in range(run.start, run.start + run.count):
                self._shared[page] = self._shared.get(page, 0) + 1

    def release(self, runs: tuple[Run, ...]) -> None:
        """Gives one reference back, in any state but free; the last one frees the page.

        The caller knows that no peer can write any more (`drained` or a fence), and that no
        pass that touches the pages is in flight.
        """
        for run in runs:
            for last in self._drop_references(run) if self._shared else (run,):
                self._move(last, _FREE, _FROM_OWNED)
                self._free.put(last.start, last.start + last.count)

    def _move(self, run: Run, state: int, allowed: tuple[int, ...]) -> None:
        """Sets the state of a run's pages, all of which must be in one of the `allowed` states."""
        start, count = run
        stop = start + count
        assert 0 <= start < stop <= len(self._state), f"{run} of {len(self._state)} pages"
        found = {old: self._state.count(old, start, stop) for old in allowed}
        if sum(found.values()) != count:
            held = sorted({_NAMES[old] for old in self._state[start:stop]})
            wanted = [_NAMES[old] for old in allowed]
            raise AssertionError(f"pages of {run} are {held}, allowed is {wanted}")
        for old, moved in found.items():
            self._counts[old] -= moved
        self._counts[state] += count
        self._state[start:stop] = bytes((state,)) * count

    def _drop_references(self, run: Run) -> list[Run]:
        """Drops one reference per page; returns the parts of `run` that have none left."""
        last = []
        first = run.start
        stop = run.start + run.count
        for page in range(run.start, stop):
            extra = self._shared.get(page)
            if extra is None:
                continue
            if extra == 1:
                del self._shared[page]
            else:
                self._shared[page] = extra - 1
            if first < page:
                last.append(Run(first, page - first))
            first = page + 1
        if first < stop:
            last.append(Run(first, stop - first))
        return last


class _FreeRuns:
    """The maximal free runs: by both ends, to merge on release, and by length, for best fit.

    P pages have at most √(2P) different lengths of runs at one time, so the sorted list of lengths
    stays short even where thousands of single pages are free.
    """

    def __init__(self) -> None:
        self._stops: dict[int, int] = {}  # start → stop
        self._starts: dict[int, int] = {}  # stop → start
        self._by_length: dict[int, dict[int, None]] = {}  # length → starts
        self._lengths: list[int] = []  # keys of _by_length, sorted

    def put(self, start: int, stop: int) -> None:
        before = self._starts.get(start)
        if before is not None:
            self._remove(before, start)
            start = before
        after = self._stops.get(stop)
        if after is not None:
            self._remove(stop, after)
            stop = after
        self._insert(start, stop)

    def take(self, count: int) -> Run:
        """`count` pages of the shortest run that has them, else the whole longest run."""
        index = min(bisect_left(self._lengths, count), len(self._lengths) - 1)
        length = self._lengths[index]
        start = next(reversed(self._by_length[length]))  # freed last; from the front it is O(n)
        self._remove(start, start + length)
        if length <= count:
            return Run(start, length)
        self._insert(start + count, start + length)
        return Run(start, count)

    def _insert(self, start: int, stop: int) -> None:
        self._stops[start] = stop
        self._starts[stop] = start
        starts = self._by_length.get(stop - start)
        if starts is None:
            starts = self._by_length[stop - start] = {}
            insort(self._lengths, stop - start)
        starts[start] = None

    def _remove(self, start: int, stop: int) -> None:
        del self._stops[start]
        del self._starts[stop]
        starts = self._by_length[stop - start]
        del starts[start]
        if not starts:
            del self._by_length[stop - start]
            del self._lengths[bisect_left(self._lengths, stop - start)]
