"""Ends an engine of which a pass stands still: who waits for its tokens would wait for ever."""

import asyncio
import logging

from pdnode.daemon.engine import Engine
from pdnode.obs.faults import report
from pdnode.obs.log import event

_log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Between two looks. What counts is looks, not the clock: a host that was frozen is no fault."""


class PassWatch:
    """A running pass that finishes no layer for `stall_s` costs its group's workers their lives;
    the node then starts another engine (daemon/node.py).
    """

    def __init__(self, engine: Engine, stall_s: float) -> None:
        self._groups = engine.groups
        self._stall_s = stall_s
        self._layers = [-1] * len(engine.groups)
        self._stood_s = [0.0] * len(engine.groups)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - nobody awaits this task
                report(error, "a look at the passes failed")

    def look(self) -> None:
        """Call it every LOOK_S."""
        for number, group in enumerate(self._groups):
            if group.worker.died.done():
                continue
            before, layers = self._layers[number], group.worker.layers_done()
            stands = group.steps.busy and layers == before
            self._layers[number] = layers
            self._stood_s[number] = self._stood_s[number] + LOOK_S if stands else 0.0
            if self._stood_s[number] >= self._stall_s:
                event(
                    _log, logging.ERROR, "engine.stalled", "a pass stands still: its workers end",
                    group=number, layers=layers, stall_s=self._stall_s,
                )  # fmt: skip
                group.worker.kill(f"no layer of a pass was done for {self._stall_s:g} s")
