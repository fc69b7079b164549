"""The life of the daemon as one small machine: in which phase it is, and what asks it to move on.

    starting ──► serving ──► draining ──► stopped
        │         │ ▲  ▲         ▲
        │         ▼ │  └─ switching (another role)
        │     restarting (another engine) ──► stopped
        └──────────────────────────────────► stopped

A signal, the end of the engine and a wish for another role only set a mark and wake `changed`; the
node (daemon/node.py) acts on them in this order of rank. Everything runs on the event loop.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from pdnode.types import Role

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
FORGIVEN_AFTER_S = 300.0
"""An engine that served for so long counts as healthy: its end is the first one again."""


class Phase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    SWITCHING = "switching"
    DRAINING = "draining"
    STOPPED = "stopped"


_NEXT = {
    Phase.STARTING: {Phase.SERVING, Phase.STOPPED},
    Phase.SERVING: {Phase.RESTARTING, Phase.SWITCHING, Phase.DRAINING},
    Phase.RESTARTING: {Phase.SERVING, Phase.STOPPED},
    Phase.SWITCHING: {Phase.SERVING, Phase.RESTARTING, Phase.DRAINING, Phase.STOPPED},
    Phase.DRAINING: {Phase.STOPPED},
    Phase.STOPPED: set(),
}


@dataclass(slots=True)
class Restarts:
    """How often the engine died in a row, and how long to wait before the next one."""

    most: int
    deaths: int = 0
    _served_at: float | None = None

    def served(self, now: float) -> None:
        self._served_at = now

    def died(self, now: float) -> float | None:
        """Seconds to wait before the next start; None where there is to be none."""
        if self._served_at is not None and now - self._served_at >= FORGIVEN_AFTER_S:
            self.deaths = 0
        self._served_at = None
        self.deaths += 1
        if self.deaths > self.most:
            return None
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (self.deaths - 1)))


@dataclass(slots=True)
class Lifecycle:
    """`on_phase` is called after every change of phase."""

    restarts: Restarts
    phase: Phase = Phase.STARTING
    signals: int = 0  # SIGTERM and SIGINT so far; the second one forces
    died: str | None = None  # why there is no engine
    fatal: bool = False  # and no other one will be started
    wanted: Role | None = None  # the role to change to
    delay_s: float = 0.0  # before the next engine is started
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set once `stopping` holds
    on_phase: list[Callable[[Phase], None]] = field(default_factory=list)

    def enter(self, phase: Phase) -> None:
        assert phase in _NEXT[self.phase], f"{self.phase} → {phase}"
        self.phase = phase
        for tell in self.on_phase:
            tell(phase)

    @property
    def stopping(self) -> bool:
        """The process is to end: nothing may be begun."""
        return self.signals > 0 or self.fatal

    def signalled(self) -> None:
        self.signals += 1
        self.changed.set()
        self.stop.set()

    def engine_died(self, text: str, now: float, *, fatal: bool) -> bool:
        """The engine cannot go on; `fatal`: nor can the process, also when restarts are used up.
        False if it was known already.
        """
        if self.died is not None and (self.fatal or not fatal):
            return False
        delay_s = None if fatal else self.restarts.died(now)
        self.died, self.fatal, self.delay_s = text, delay_s is None, delay_s or 0.0
        self.changed.set()
        if self.fatal:
            self.stop.set()
        return True

    def revived(self) -> None:
        """Another engine is about to be started."""
        assert not self.fatal
        self.died = None

    def want(self, role: Role) -> None:
        self.wanted = role
        self.changed.set()
