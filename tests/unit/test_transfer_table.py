"""Every (state, input) pair of both transfer machines has a defined answer: the table is the test.

A state here is a state of the machine with what else decides its answers. A row says what comes
out and the state after it; `-` is nothing. Rows with `!` cannot be reached, and say why.
"""

import inspect
from collections.abc import Callable

import pytest

from pdnode.core import transfer, wire
from pdnode.core.grant import Grant, GrantState
from pdnode.core.plan import PageSpan, Program
from pdnode.core.push import Push, PushState
from pdnode.core.slots import Slot
from pdnode.core.transfer import Effect, FailCause
from pdnode.types import RequestKey, TransferId
from tests.support.transfer_table import GRANT_TABLE, PUSH_TABLE

KEY = RequestKey("boot:1")
OLD, SLOT, FRESH, FOREIGN = Slot(1, 0), Slot(2, 7), Slot(3, 0), Slot(9, 9)
P, Q = (10, 20), (11, 21)


def show(effects: list[Effect]) -> str:
    return ", ".join(_word(effect) for effect in effects) or "-"


def _word(effect: Effect) -> str:
    match effect:
        case transfer.Send(frame=wire.Failed(cause=cause, pairs=pairs)):
            return f"Failed({cause}{' ' + str(len(pairs)) if pairs else ''})"
        case transfer.Send(frame=frame):
            return type(frame).__name__
        case transfer.Lost(cause=cause, retry=retry):
            return f"lost({cause}{'' if retry else ', final'})"
        case transfer.Submit(base=base, chunk=chunk):
            return f"submit {chunk}{'' if base is None else f'@{base}'}"
        case transfer.PairDown(pair=pair):
            return "pair down p" if pair == P else "pair down q"
        case _:
            return type(effect).__name__.lower()


# Grant


def _grant(*inputs: Callable[[Grant], list[Effect]]) -> Callable[[], Grant]:
    def make() -> Grant:
        grant = Grant(KEY, SLOT, request_stall_s=30.0, drained_timeout_s=10.0)
        for put in inputs:
            put(grant)
        return grant

    return make


def _dispatch(grant: Grant) -> list[Effect]:
    return grant.dispatched(0.0)


def _regranted(grant: Grant) -> list[Effect]:
    grant.slot = OLD
    grant.dispatched(0.0)
    return grant.pair_fenced(SLOT, 0.0)


GRANTS: dict[str, Callable[[], Grant]] = {
    "reserved": _grant(),
    "dispatched": _grant(_dispatch),
    "dispatched drained": _grant(_dispatch, lambda g: g.drain_done(0.0)),
    "dispatched regranted": _grant(_regranted),
    "dispatched regranted old-reached": _grant(_regranted, lambda g: g.reached(OLD, 0.0)),
    "complete": _grant(_dispatch, lambda g: g.reached(SLOT, 0.0)),
    "complete drained": _grant(
        _dispatch, lambda g: g.reached(SLOT, 0.0), lambda g: g.drain_done(0.0)
    ),
    "complete ended": _grant(_dispatch, lambda g: g.reached(SLOT, 0.0), lambda g: g.end(0.0)),
    "failed": _grant(_dispatch, lambda g: g.failed(FailCause.ENGINE, "x", (), 0.0)),
    "failed lost": _grant(_dispatch, lambda g: g.session_lost("x", 0.0)),
    "cancelling": _grant(_dispatch, lambda g: g.cancel(0.0)),
    "free": _grant(_dispatch, lambda g: g.drain_done(0.0), lambda g: g.cancel(0.0)),
}

GRANT_INPUTS: dict[str, Callable[[Grant], list[Effect]]] = {
    "dispatched": lambda g: g.dispatched(1.0),
    "cancel": lambda g: g.cancel(1.0),
    "end": lambda g: g.end(1.0),
    "tick after 9 s": lambda g: g.tick(9.0),
    "tick after 11 s": lambda g: g.tick(11.0),
    "tick after 31 s": lambda g: g.tick(31.0),
    "pair_fenced": lambda g: g.pair_fenced(FRESH if g.wants_slot else None, 1.0),
    "pair_fenced, no slot left": lambda g: g.pair_fenced(None, 1.0),
    "accepted": lambda g: g.accepted(3, 1.0),
    "progress": lambda g: g.progress(5, 1.0),
    "landed": lambda g: g.landed(5, 1.0),
    "failed": lambda g: g.failed(FailCause.WRITE, "x", (), 1.0),
    "failed, pairs": lambda g: g.failed(FailCause.WRITE, "x", [P, Q], 1.0),
    "drain_done": lambda g: g.drain_done(1.0),
    "reached, its slot": lambda g: g.reached(SLOT, 1.0),
    "reached, old slot": lambda g: g.reached(OLD, 1.0),
    "reached, other generation": lambda g: g.reached(Slot(SLOT.slot, SLOT.generation + 1), 1.0),
    "overshoot, its slot": lambda g: g.overshoot(SLOT, 1.0),
    "overshoot, other slot": lambda g: g.overshoot(FOREIGN, 1.0),
    "session_lost": lambda g: g.session_lost("x", 1.0),
    "session_fenced": lambda g: g.session_fenced(),
}

# Push

PROGRAM = Program(0, 0, 0, 0, 64, True, (PageSpan(0, 0, 1),))


class _Numbers:
    def __init__(self) -> None:
        self.last = 0

    def __call__(self) -> TransferId:
        self.last += 1
        return TransferId(self.last)


def _push(*inputs: Callable[[Push], list[Effect]]) -> Callable[[], Push]:
    def make() -> Push:
        push = Push(KEY, SLOT.immediate, 8, 0.0, 10.0, _Numbers())
        for put in inputs:
            put(push)
        return push

    return make


def _plan(push: Push, last: bool = False) -> list[Effect]:
    number = len(push.batches)
    return push.planned((PROGRAM,), chunk=number, base=2 * number, last=last, now=0.0)


def _number(push: Push) -> TransferId:
    assert push.attempt is not None
    return push.attempt.transfer


def _live(others: bool) -> list[transfer.Pair]:
    return [(9, 9)] if others else []


def _failed(
    push: Push,
    *pairs: transfer.Pair,
    others: bool = True,
    stranded: bool = False,
    now: float = 0.0,
) -> list[Effect]:
    return push.transfer_failed(
        _number(push), pairs, text="x", live=_live(others), stranded=stranded, now=now
    )


def _settled(
    push: Push, *pairs: transfer.Pair, others: bool = True, now: float = 0.0
) -> list[Effect]:
    return push.transfer_settled(_number(push), pairs, text="x", live=_live(others), now=now)


def _drained(push: Push, now: float = 0.0) -> list[Effect]:
    return push.transfer_drained(_number(push), now)


def _half(push: Push) -> list[Effect]:
    return push.pass_done(4, 0.0)


def _whole(push: Push) -> list[Effect]:
    return push.pass_done(8, 0.0)


def _last(push: Push) -> list[Effect]:
    return _plan(push, last=True)


def _write_failed(push: Push) -> list[Effect]:
    return _failed(push, P)


def _cancelled(push: Push) -> list[Effect]:
    return push.cancel(0.0)


PUSHES: dict[str, Callable[[], Push]] = {
    "queued": _push(),
    "running in-pass": _push(_plan),
    "running": _push(_plan, _half),
    "running in-last-pass": _push(_plan, _half, _last),
    "computed": _push(_last, _whole),
    "replay in-pass": _push(_plan, _write_failed),
    "replay failed": _push(_last, _whole, _write_failed),
    "replay unfenced": _push(_last, _whole, _write_failed, lambda p: _settled(p, P)),
    "replay regranted": _push(_last, _whole, lambda p: p.regrant(FRESH.immediate, 0.0)),
    "replay regranted in-pass": _push(_plan, lambda p: p.regrant(FRESH.immediate, 0.0)),
    "replay fenced": _push(
        _last, _whole, _write_failed, lambda p: _settled(p, P), lambda p: p.nic_fenced(P, 0.0)
    ),
    "cancelling": _push(_last, _whole, _cancelled),
    "cancelling in-pass": _push(_plan, _cancelled),
    "cancelling told in-pass": _push(_plan, _cancelled, _drained),
    "cancelling unfenced": _push(
        _last, _whole, _cancelled, _write_failed, lambda p: _settled(p, P)
    ),
    "failed": _push(_last, _whole, lambda p: p.engine_failed("x", 0.0)),
    "failed unfenced": _push(
        _last, _whole, lambda p: _failed(p, P, others=False), lambda p: _settled(p, P, others=False)
    ),
    "lost": _push(_last, _whole, lambda p: p.session_lost(0.0)),
    "cancelling failed": _push(_last, _whole, _cancelled, _write_failed),
    "failed outstanding": _push(_last, _whole, lambda p: _failed(p, P, others=False)),
    "lost failed": _push(_last, _whole, lambda p: p.session_lost(0.0), _write_failed),
    "lost in-pass": _push(_plan, lambda p: p.session_lost(0.0)),
    "done": _push(_last, _whole, _drained),
}

PUSH_INPUTS: dict[str, Callable[[Push], list[Effect]]] = {
    "planned": _plan,
    "planned, last": _last,
    "pass_done": _half,
    "pass_done, all": _whole,
    "engine_failed": lambda p: p.engine_failed("x", 1.0),
    "cancel": lambda p: p.cancel(1.0),
    "regrant": lambda p: p.regrant(FRESH.immediate, 1.0),
    "nic_fenced": lambda p: p.nic_fenced(P, 1.0),
    "nic_fenced, other": lambda p: p.nic_fenced(Q, 1.0),
    "transfer_drained": lambda p: _drained(p, 1.0),
    "transfer_failed": lambda p: _failed(p, P, now=1.0),
    "transfer_failed, all pairs": lambda p: _failed(p, P, others=False, now=1.0),
    "transfer_failed, no pair": lambda p: _failed(p, now=1.0),
    "transfer_failed, stranded": lambda p: _failed(p, now=1.0, stranded=True),
    "transfer_settled": lambda p: _settled(p, P, now=1.0),
    "transfer_settled, one more": lambda p: _settled(p, P, Q, now=1.0),
    "transfer_settled, all pairs": lambda p: _settled(p, P, Q, others=False, now=1.0),
    "not_opened": lambda p: p.not_opened(_number(p), "x", 1.0),
    "refused": lambda p: p.refused("x", 1.0),
    "session_lost": lambda p: p.session_lost(1.0),
    "tick after 9 s": lambda p: p.tick(9.0),
    "tick after 11 s": lambda p: p.tick(11.0),
}


def rows(table: str) -> dict[tuple[str, str], tuple[str, str]]:
    """(state, input) → (effects, state after); `!` as the state after: not reachable."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    state = ""
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            state = line.rstrip(":")
            continue
        inputs, effects, after = (part.strip() for part in line.split("|"))
        for given in inputs.split("; "):
            assert (state, given) not in found, f"{state} × {given} is there twice"
            found[state, given] = (effects, after)
    return found


GRANT_ROWS, PUSH_ROWS = rows(GRANT_TABLE), rows(PUSH_TABLE)


@pytest.mark.parametrize(("state", "given"), GRANT_ROWS)
def test_grant(state: str, given: str) -> None:
    effects, after = GRANT_ROWS[state, given]
    grant = GRANTS[state]()
    if after == "!":
        assert effects, "a reason is missing"
        with pytest.raises(AssertionError):
            GRANT_INPUTS[given](grant)
        return
    assert (show(GRANT_INPUTS[given](grant)), grant.state) == (effects, after)


@pytest.mark.parametrize(("state", "given"), PUSH_ROWS)
def test_push(state: str, given: str) -> None:
    effects, after = PUSH_ROWS[state, given]
    push = PUSHES[state]()
    if after == "!":
        assert effects, "a reason is missing"
        with pytest.raises(AssertionError):
            PUSH_INPUTS[given](push)
        return
    assert (show(PUSH_INPUTS[given](push)), push.state) == (effects, after)


def test_every_cell_has_a_row() -> None:
    assert set(GRANT_ROWS) == {(state, given) for state in GRANTS for given in GRANT_INPUTS}
    assert set(PUSH_ROWS) == {(state, given) for state in PUSHES for given in PUSH_INPUTS}


@pytest.mark.parametrize(
    ("machine", "states", "made", "inputs"),
    [(Grant, GrantState, GRANTS, GRANT_INPUTS), (Push, PushState, PUSHES, PUSH_INPUTS)],
)
def test_the_table_has_every_state_and_input(
    machine: type,
    states: type[GrantState | PushState],
    made: dict[str, Callable[[], Grant | Push]],
    inputs: dict[str, object],
) -> None:
    assert {make().state for make in made.values()} == set(states)
    assert all(make().state == name.split()[0] for name, make in made.items())
    methods = {
        name
        for name, _ in inspect.getmembers(machine, inspect.isfunction)
        # `overshoot` is `distrust` for the fabric's reason.
        if not name.startswith("_") and name not in ("prefill_s", "distrust")
    }
    assert {name.split()[0].rstrip(",") for name in inputs} == methods
