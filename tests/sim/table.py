"""Which (state, event) cells of `Grant` and `Push` the seeds have been through."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from pdnode.core.grant import Grant, GrantState
from pdnode.core.push import Push, PushState

Cell = tuple[str, str, str]  # machine, state, event

EVENTS = {
    "grant": (
        "dispatched", "accepted", "progress", "landed", "reached", "overshoot", "failed",
        "drain_done", "pair_fenced", "cancel", "end", "session_lost", "session_fenced", "tick",
    ),
    "push": (
        "planned", "pass_done", "transfer_drained", "transfer_failed", "transfer_settled",
        "cancel", "regrant", "nic_fenced", "session_lost", "engine_failed", "refused",
        "not_opened", "tick",
    ),
}  # fmt: skip
MACHINES: dict[str, tuple[type, type[GrantState] | type[PushState]]] = {
    "grant": (Grant, GrantState),
    "push": (Push, PushState),
}


@contextmanager
def counted(into: Counter[Cell]) -> Iterator[None]:
    """Counts every input of both machines by the state that it meets."""
    with ExitStack() as stack:
        for name, (machine, _) in MACHINES.items():
            for event in EVENTS[name]:
                stack.enter_context(
                    patch.object(machine, event, _counting(getattr(machine, event), name, into))
                )
        yield


def _counting(real: Any, name: str, into: Counter[Cell]) -> Any:  # noqa: ANN401
    event = real.__name__

    @wraps(real)
    def method(self: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        into[name, self.state.value, event] += 1
        return real(self, *args, **options)

    return method


def lines(found: Counter[Cell]) -> Iterator[str]:
    """The table as text: a row per event, a column per state; `·` for what cannot be."""
    for name, (_, states) in MACHINES.items():
        yield ""
        yield f"{name:18}" + "".join(f"{state.value:>12}" for state in states)
        for event in EVENTS[name]:
            row = [found[name, state.value, event] for state in states]
            cells = (f"{number or '·':>12}" for number in row)
            yield f"{event:18}" + "".join(cells)
