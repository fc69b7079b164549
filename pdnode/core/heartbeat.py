"""Is the peer alive, and does it get on? Silence, round-trip time, and stalled progress.

Silence: no frame of any kind for `link_lost_s`. Every frame is sent by the peer's control loop, so
a loop that stands still for so long is a lost peer.

Stalled progress: for `stall_s` every heartbeat said that a pass is running or due, and neither the
number of finished passes nor the core's loop turns moved. Either one that moves, or an idle step
loop, ends it: a long pass turns the core with every layer, and a core with nothing to do sleeps
while decode steps go on. Measured between arrivals on this node's clock. A stalled peer is not lost
(its memory and ours are as they were), but nothing new is given to it.
"""

from collections import deque
from typing import NamedTuple

from pdnode.core.wire import Heartbeat

_SENT_KEPT = 64  # heartbeats whose sending time is remembered for the echo


class Counters(NamedTuple):
    """What this node tells in its heartbeats."""

    steps: int  # passes finished since start
    step_busy: bool  # a pass is running or due
    core: int  # progress-thread loop turns since start
    waiting_tokens: int
    free_pages: int


class Liveness:
    """Both directions of the heartbeats of one link, from `now` on."""

    def __init__(
        self, now: float, *, heartbeat_s: float, link_lost_s: float, stall_s: float
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._link_lost_s = link_lost_s
        self._stall_s = stall_s
        self.heard_at = now  # the last frame of any kind
        self._due_at = now
        self._sequence = 0
        self._sent: deque[tuple[int, float]] = deque(maxlen=_SENT_KEPT)
        self._moved_at = now
        self._last_at = now
        self.last: Heartbeat | None = None
        self.rtt_s = 0.0
        self.stalled = False

    @property
    def next_at(self) -> float:
        return min(self._due_at, self.heard_at + self._link_lost_s)

    def heard(self, now: float) -> None:
        """A frame arrived."""
        self.heard_at = now

    def silent(self, now: float) -> bool:
        return now - self.heard_at >= self._link_lost_s

    def due(self, now: float) -> bool:
        return now >= self._due_at

    def beat(self, now: float, boot: str, counters: Counters) -> Heartbeat:
        """The heartbeat to send now."""
        self._sequence += 1
        self._sent.append((self._sequence, now))
        self._due_at = now + self._heartbeat_s
        return Heartbeat(
            boot=boot,
            sequence=self._sequence,
            echo=self.last.sequence if self.last else 0,
            echo_delay_s=now - self._last_at if self.last else 0.0,
            steps=counters.steps,
            step_busy=counters.step_busy,
            core=counters.core,
            waiting_tokens=counters.waiting_tokens,
            free_pages=counters.free_pages,
        )

    def objection(self, beat: Heartbeat) -> str | None:
        """The link keeps order, so a peer that repeats or invents numbers is not in its senses."""
        expected = self.last.sequence + 1 if self.last else 1
        if beat.sequence != expected:
            return f"heartbeat {beat.sequence}, expected {expected}"
        if beat.echo > self._sequence:
            return f"heartbeat echoes {beat.echo}, {self._sequence} were sent"
        return None

    def take(self, beat: Heartbeat, now: float) -> str | None:
        """Account for a heartbeat without objection. Returns what to report when that changed."""
        for sequence, sent_at in self._sent:
            if sequence == beat.echo:
                self.rtt_s = max(0.0, now - sent_at - beat.echo_delay_s)
        last = self.last
        moved = last is None or (last.steps, last.core) != (beat.steps, beat.core)
        if moved or not beat.step_busy:
            self._moved_at = now
        self.last = beat
        self._last_at = now
        stalled = now - self._moved_at >= self._stall_s
        if stalled == self.stalled:
            return None
        self.stalled = stalled
        if stalled:
            return f"progress stalled: busy in pass {beat.steps} for {self._stall_s:g} s"
        return "progress resumed"
