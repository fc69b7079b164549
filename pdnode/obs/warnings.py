"""Warnings: what an operator should look at now. Feeds /readyz, metrics, snapshot and log.

A source is asked for the conditions that hold; the table says how bad each is, whether the node
takes work under it, how long it must last to be shown, and which other one explains it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdnode.obs.log import event
from pdnode.obs.snapshot import Warning

_log = logging.getLogger(__name__)

Severity = Literal["warning", "error"]
MAX_ACTIVE = 256
"""Conditions kept at a time; what is beyond is left out (peers and NICs are bounded by config)."""


class Kind(NamedTuple):
    """One row of the registry. `depends_on`: while one of these holds, this one is not shown."""

    code: str
    severity: Severity
    title: str
    affects_readiness: bool = False
    visible_after_s: float = 0.0
    depends_on: tuple[str, ...] = ()


REGISTRY: Mapping[str, Kind] = {
    kind.code: kind
    for kind in (
        Kind("E101", "error", "the engine is dead", affects_readiness=True),
        Kind("W101", "warning", "loading", affects_readiness=True),
        Kind("W102", "warning", "draining", affects_readiness=True),
        Kind(
            "W103", "error", "no usable prefill, and the policy is refuse",
            affects_readiness=True, depends_on=("W101",),
        ),
        Kind(
            "W104", "warning", "no usable prefill, so prompts are computed here",
            visible_after_s=5.0, depends_on=("W101", "W102"),
        ),
        Kind("W105", "error", "the engine died and is started again", affects_readiness=True),
        Kind("W106", "warning", "the role is not the one of the configuration file"),
        Kind("W107", "warning", "a change of role failed"),
        Kind("W110", "warning", "the configuration could not be reloaded"),
        Kind("W120", "warning", "pages are quarantined", visible_after_s=2.0),
        Kind("W121", "error", "quarantined pages stop admission"),
        Kind("E130", "error", "KV pages do not hold what was written"),
        Kind("W140", "warning", "KV pages take a detour through host memory"),
        Kind("W201", "error", "a peer does not fit this node"),
        Kind("W202", "warning", "a peer is not reached", visible_after_s=1.0),
        Kind("W203", "warning", "a peer is up but does not get on"),
        Kind("W205", "error", "a peer's fence is not confirmed"),
        Kind("W206", "warning", "a NIC carries nothing to a peer"),
        Kind("W207", "warning", "a device group has no NIC left to a peer"),
    )
}  # fmt: skip
assert not any(kind.affects_readiness and kind.visible_after_s for kind in REGISTRY.values())


class Condition(NamedTuple):
    """What a source sees. `subject` tells two of one code apart (a peer's name)."""

    code: str
    text: str
    subject: str = ""


@dataclass(slots=True)
class _Active:
    since: float
    text: str
    told: bool = False


class Warnings:
    """Asks its sources whenever it is read. `clock` is monotonic. Runs on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sources: list[Callable[[], Iterable[Condition]]] = []
        self._active: dict[tuple[str, str], _Active] = {}

    def add_source(self, source: Callable[[], Iterable[Condition]]) -> None:
        """`source` must be quick; codes that the registry does not have are a fault."""
        self._sources.append(source)

    def current(self) -> tuple[Warning, ...]:
        """Those to show now, errors first, then by code. Logs what came and went."""
        self._update()
        codes = {code for code, _ in self._active}
        now = self._clock()
        shown = []
        for (code, subject), active in self._active.items():
            kind = REGISTRY[code]
            lasts_s = now - active.since
            if lasts_s < kind.visible_after_s or codes.intersection(kind.depends_on):
                continue
            if not active.told:
                active.told = True
                _tell("warning.raised", code, active.text)
            shown.append(
                Warning(
                    code=code,
                    severity=kind.severity,
                    text=active.text,
                    since_s=lasts_s,
                    affects_readiness=kind.affects_readiness,
                    subjects=(subject,) if subject else (),
                )
            )
        return tuple(sorted(shown, key=lambda one: (one.severity, one.code, one.subjects)))

    def _update(self) -> None:
        now = self._clock()
        found: dict[tuple[str, str], str] = {}
        for source in self._sources:
            for code, text, subject in source():
                assert code in REGISTRY, code
                found[code, subject] = text
        for key in self._active.keys() - found.keys():
            gone = self._active.pop(key)
            if gone.told:
                _tell("warning.cleared", key[0], gone.text)
        for key, text in found.items():
            active = self._active.get(key)
            if active is not None:
                active.text = text
            elif len(self._active) < MAX_ACTIVE:
                self._active[key] = _Active(now, text)


def _tell(event_code: str, code: str, text: str) -> None:
    event(_log, logging.INFO, event_code, REGISTRY[code].title, warning=code, about=text)
