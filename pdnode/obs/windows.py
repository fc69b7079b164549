"""What happened in the last 60 s: quantiles and sums over one-second slots. Pure: time is given.

Cheap to feed (once per token) and cheap to read: the total over all slots is kept up to date, so a
read walks a few hundred counters whatever the load.
"""

import math
from collections import Counter, deque

WINDOW_S = 60
_LEAST_S = 1e-5
_GROWTH = 1.05
_BUCKETS = 1 + math.ceil(math.log(1e4 / _LEAST_S, _GROWTH))
_LOG_GROWTH = math.log(_GROWTH)


class WindowQuantiles:
    """Durations of the last WINDOW_S seconds; quantiles within 2.5 %, from 10 µs to 10,000 s."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, Counter[int]]] = deque()
        self._total = [0] * _BUCKETS
        self._count = 0

    def add(self, value_s: float, *, now: float) -> None:
        second = int(now)
        if not self._slots or self._slots[-1][0] != second:
            self._forget(now)
            self._slots.append((second, Counter()))
        bucket = 0
        if value_s > _LEAST_S:
            bucket = min(_BUCKETS - 1, 1 + int(math.log(value_s / _LEAST_S) / _LOG_GROWTH))
        self._slots[-1][1][bucket] += 1
        self._total[bucket] += 1
        self._count += 1

    def count(self, now: float) -> int:
        self._forget(now)
        return self._count

    def quantile_s(self, share: float, now: float) -> float | None:
        """The least value that `share` (0..1) of all do not exceed; None where there is none."""
        self._forget(now)
        rank = max(1, math.ceil(share * self._count))
        seen = 0
        for bucket, count in enumerate(self._total):
            seen += count
            if count and seen >= rank:
                return 0.0 if bucket == 0 else _LEAST_S * _GROWTH ** (bucket - 0.5)
        return None

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - WINDOW_S:
            _, gone = self._slots.popleft()
            for bucket, count in gone.items():
                self._total[bucket] -= count
            self._count -= gone.total()


class WindowSums:
    """Counts by name over the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, Counter[str]]] = deque()
        self._total: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1, *, now: float) -> None:
        second = int(now)
        if not self._slots or self._slots[-1][0] != second:
            self._forget(now)
            self._slots.append((second, Counter()))
        self._slots[-1][1][name] += amount
        self._total[name] += amount

    def get(self, name: str, now: float) -> int:
        self._forget(now)
        return self._total[name]

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - WINDOW_S:
            self._total.subtract(self._slots.popleft()[1])


class Rates:
    """One value a second of a counter that only grows: the rate now, its peak, its last minute."""

    def __init__(self) -> None:
        self.history: deque[int] = deque(maxlen=WINDOW_S)  # per second, oldest first
        self.peak = 0
        self._last: tuple[float, int] | None = None

    def sample(self, total: int, *, now: float) -> None:
        """Call about once a second. A counter that went back (a new core) starts anew."""
        last, self._last = self._last, (now, total)
        if last is None or total < last[1] or now <= last[0]:
            return
        rate = round((total - last[1]) / (now - last[0]))
        self.history.append(rate)
        self.peak = max(self.peak, rate)

    @property
    def now(self) -> int | None:
        """Per second, over the last sample; None before there are two."""
        return self.history[-1] if self.history else None

    @property
    def mean(self) -> float | None:
        """Per second, over the history."""
        return sum(self.history) / len(self.history) if self.history else None
