"""How long a NIC pair stays out after it was lost: doubling, and remembered over reconnects."""

from collections.abc import Iterable
from dataclasses import dataclass, field

Pair = tuple[int, int]


@dataclass(slots=True)
class _Entry:
    level: int  # losses in a row before this one
    lost_at: float
    until: float
    out: bool = True
    back_at: float = 0.0


@dataclass(slots=True)
class Cooldowns:
    """The NIC pairs of one peer. Pairs are (local NIC, remote NIC); times are of one monotonic
    clock. A pair that has been back for `longest_s` starts anew with `first_s`."""

    first_s: float
    longest_s: float
    _entries: dict[Pair, _Entry] = field(default_factory=dict)

    def lost(self, pair: Pair, now: float) -> float:
        """The pair is out; when it may be tried again. Says the same while it cools down."""
        entry = self._entries.get(pair)
        if entry is not None and entry.out:
            return entry.until if now < entry.until else self.failed(pair, now)
        level = 0
        if entry is not None and now - entry.back_at < self.longest_s:
            level = entry.level + 1
        self._entries[pair] = _Entry(level, now, now + self._wait_s(level))
        return self._entries[pair].until

    def failed(self, pair: Pair, now: float) -> float:
        """An attempt to bring it back came to nothing; when the next one is due."""
        entry = self._entries.setdefault(pair, _Entry(-1, now, now))
        entry.level += 1
        entry.until = now + self._wait_s(entry.level)
        return entry.until

    def back(self, pair: Pair, now: float) -> None:
        entry = self._entries.get(pair)
        if entry is not None:
            entry.out, entry.back_at = False, now

    def forgive(self, since: float) -> None:
        """What was lost since then was the loss of the whole peer, not of its NICs."""
        self._entries = {p: one for p, one in self._entries.items() if one.lost_at < since}

    def left_out(self, pairs: Iterable[Pair], now: float) -> dict[Pair, float]:
        """Those of `pairs` that still cool down, with the time of their next try; none if all do:
        a session needs one."""
        pairs = list(pairs)
        found = {
            pair: entry.until
            for pair in pairs
            if (entry := self._entries.get(pair)) is not None and entry.out and entry.until > now
        }
        return found if len(found) < len(pairs) else {}

    def _wait_s(self, level: int) -> float:
        return min(self.first_s * 2.0 ** min(level, 32), self.longest_s)
