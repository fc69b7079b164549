"""Keeps the supervisor informed: phase, progress, warnings, and whether the work gets on.

`WATCHDOG=1` is sent only when the engine and the transfer core moved since the last look, or had
nothing to do. A timer on the event loop alone would prove nothing about either.
"""

import asyncio
import os
from collections.abc import Callable
from itertools import zip_longest

from pdnode.daemon.figures import Figures
from pdnode.daemon.lifecycle import Lifecycle, Phase
from pdnode.daemon.notify import Notifier, extend, reloading
from pdnode.obs.faults import report

LONGEST_INTERVAL_S = 1.0
LOOKS_PER_WATCHDOG = 8
EXTEND_S = 60.0
"""What start and stop ask for, again and again: each has its own bound ([engine] start_timeout_s,
[node] shutdown_timeout_s), and this is about the event loop, which blocks for a moment at most."""


class Progress:
    """Looks at the counters of engine and core. `moved` is asked at even intervals."""

    def __init__(self, parts: Figures) -> None:
        self._parts = parts
        self._layers: list[int] = []  # by group
        self._turns: list[int] = []  # by thread of the core

    def moved(self) -> bool:
        """Since the last call. While there is no engine there is nothing that could stand still:
        loading one has a bound of its own.
        """
        return self._engine_moved() & self._core_moved()

    def _engine_moved(self) -> bool:
        """Every group that has work has finished a layer. One of which a worker is gone has none:
        its descriptors are closed, and another engine follows.
        """
        engine, before = self._parts.engine, self._layers
        if engine is None or any(group.worker.died.done() for group in engine.groups):
            return True
        self._layers = [group.worker.layers_done() for group in engine.groups]
        return all(
            now != then or not group.steps.has_work
            for group, now, then in zip_longest(engine.groups, self._layers, before)
        )

    def _core_moved(self) -> bool:
        """Each of the core's threads. They sleep while they have nothing to do, so they are woken
        for the next look."""
        transfer = self._parts.transfer
        if transfer is None:
            return True
        before, self._turns = self._turns, transfer.fabric.turns()
        for wake_fd in transfer.wake_fds:
            os.write(wake_fd, (1).to_bytes(8, "little"))
        return all(now != then for now, then in zip_longest(self._turns, before))


class Supervisor:
    """`run` looks until it is cancelled; the phases and reloads are told at once."""

    def __init__(
        self, notifier: Notifier, lifecycle: Lifecycle, parts: Figures, detail: Callable[[], str]
    ) -> None:
        self._notifier = notifier
        self._lifecycle = lifecycle
        self._progress = Progress(parts)
        self._parts = parts
        self._detail = detail
        self.interval_s = LONGEST_INTERVAL_S
        if notifier.watchdog_s is not None:
            look_s = notifier.watchdog_s / LOOKS_PER_WATCHDOG
            self.interval_s = min(LONGEST_INTERVAL_S, look_s)
        lifecycle.on_phase.append(self._entered)

    async def run(self) -> None:
        while True:
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - nobody awaits this task
                report(error, "a look at the progress failed")
            await asyncio.sleep(self.interval_s)

    def look(self) -> None:
        messages = self._notifier.status(self._status())
        if self._lifecycle.phase in (Phase.STARTING, Phase.DRAINING):
            messages.append(extend(EXTEND_S))
        if self._notifier.watchdog_s is not None and self._progress.moved():
            messages.append("WATCHDOG=1")
        self._notifier.send(*messages)

    def reload(self, begins: bool) -> None:
        """Around a reload, of a node that has said READY."""
        if self._lifecycle.phase is Phase.SERVING:
            status = self._notifier.status(self._status())
            self._notifier.send(*(reloading() if begins else ["READY=1", *status]))

    def _entered(self, phase: Phase) -> None:
        said = {Phase.SERVING: "READY=1", Phase.DRAINING: "STOPPING=1", Phase.STOPPED: "STOPPING=1"}
        first = [said[phase]] if phase in said else []
        if phase is Phase.DRAINING:
            first.append(extend(EXTEND_S))
        self._notifier.send(*first, *self._notifier.status(self._status()))

    def _status(self) -> str:
        """ "serving as decode; W104 …": the phase, what it is busy with, and the warnings."""
        phase = self._lifecycle.phase
        head = f"{phase} as {self._parts.config.node.role}" if phase is Phase.SERVING else phase
        detail = self._detail()
        warnings = [f"{one.code} {one.text}" for one in self._parts.warnings.current()]
        if phase is not Phase.SERVING:  # the warning would only repeat the phase
            warnings = []
        return "; ".join([f"{head}: {detail}" if detail else str(head), *warnings])
