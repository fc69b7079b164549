"""Every state against every frame and every other input, for both roles: each has its answer."""

import pytest

from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.link_state import OVER, SESSION_STEPS, State
from pdnode.types import Role
from tests.support.link_duo import COUNTERS, Duo, addresses, scratch
from tests.support.link_frames import KINDS, SAMPLES

LIVE = {
    Role.DECODE: (
        State.AUTH,
        State.ADMIT,
        State.HELLO,
        State.OFFER,
        State.OPENING,
        State.CONNECT,
        State.PROBE,
        State.UP,
    ),
    Role.PREFILL: (
        State.AUTH,
        State.PROOF,
        State.HELLO,
        State.ADMIT,
        State.OPENING,
        State.ANSWER,
        State.CONNECT,
        State.PROBE,
        State.UP,
    ),
}
OPENED = frozenset(
    {State.OPENING, State.ANSWER, State.CONNECT, State.PROBE, State.UP, State.FENCING}
)

# Frames that move a link on or are for the messenger. Bye is taken everywhere, Refuse before UP,
# Heartbeat from the agreed hello on; nothing else is taken anywhere.
TAKEN: dict[Role, dict[State, set[type[wire.Message]]]] = {
    Role.DECODE: {
        State.AUTH: {wire.AuthReply},
        State.ADMIT: set(),
        State.HELLO: {wire.Hello},
        State.OFFER: {wire.SessionOffer},
        State.OPENING: set(),
        State.CONNECT: {wire.SessionReady},
        State.PROBE: {wire.Probed},
        State.UP: {
            wire.Accepted,
            wire.Progress,
            wire.Sent,
            wire.Failed,
            wire.Drained,
            wire.NicDown,
            wire.TestWritten,
            wire.NicUp,
            wire.Drain,
            wire.Undrain,
        },
    },
    Role.PREFILL: {
        State.AUTH: {wire.Auth},
        State.PROOF: {wire.AuthProof},
        State.HELLO: {wire.Hello},
        State.ADMIT: set(),
        State.OPENING: set(),
        State.ANSWER: {wire.SessionAnswer},
        State.CONNECT: set(),
        State.PROBE: {wire.Probed},
        State.UP: {
            wire.Dispatch,
            wire.Cancel,
            wire.Regrant,
            wire.NicFenced,
            wire.TestWrites,
            wire.NicUp,
            wire.Drain,
            wire.Undrain,
        },
    },
}
# Where the frame of a step leads; CONNECT and PROBE wait for the fabric as well.
NEXT = {
    Role.DECODE: {
        State.AUTH: State.ADMIT,
        State.HELLO: State.OFFER,
        State.OFFER: State.OPENING,
    },
    Role.PREFILL: {
        State.AUTH: State.PROOF,
        State.PROOF: State.HELLO,
        State.HELLO: State.ADMIT,
        State.ANSWER: State.CONNECT,
    },
}
CELLS = [
    (role, state, kind)
    for role, states in LIVE.items()
    for state in (*states, State.FENCING, State.CLOSED)
    for kind in KINDS
]


def test_the_table_is_whole() -> None:
    for role, states in LIVE.items():
        assert TAKEN[role].keys() == set(states)
        assert set(SAMPLES[role]) == set(KINDS)


def end_of(state: State, cause: str, *, refused: bool = False, say: bool) -> list[effects.Effect]:
    """All effects of a loss in `state`, in order."""
    opened = state in OPENED
    found: list[effects.Effect] = [effects.Fence()] if opened else []
    found.append(effects.SessionLost(cause, refused))
    if say:
        found.append(effects.SendFrame(wire.Bye(cause)))
    found.append(effects.CloseTransport(cause))
    return found if opened else [*found, effects.Finished()]


@pytest.mark.parametrize(("role", "state", "kind"), CELLS)
def test_frame(role: Role, state: State, kind: type[wire.Message]) -> None:
    duo = Duo()
    link = duo.to(role, state).link
    frame = SAMPLES[role][kind]
    found = link.receive(wire.encode(frame), duo.now)
    if state in OVER:
        assert found == []
        assert link.state is state
        return
    after = State.FENCING if state in OPENED else State.CLOSED
    if kind is wire.Bye:
        assert found == end_of(state, "closed by the peer: enough", say=False)
    elif kind is wire.Refuse and state is not State.UP:
        cause = "refused by the peer: page_tokens: 1 here, 2 there"
        assert found == end_of(state, cause, refused=True, say=False)
    elif kind is wire.Heartbeat and state in SESSION_STEPS:
        assert found == []
        assert link.last_heartbeat == frame
        after = state
    elif kind in TAKEN[role][state]:
        assert not any(isinstance(effect, effects.SessionLost) for effect in found)
        if state is State.UP:
            if kind is not wire.NicUp:  # tests/unit/test_nic_return.py
                assert found == [effects.Deliver(frame)]
            assert link.draining is (kind is wire.Drain)
            after = state
        else:
            after = NEXT[role].get(state, state)
    else:
        peer = "prefill" if role is Role.DECODE else "decode"
        name = wire.tag(frame)
        cause = f"protocol: {name} from a {peer} node is not taken in the step {state.value}"
        assert found == end_of(state, cause, say=True)
    assert link.state is after


EVERY_STATE = [
    (role, state)
    for role, states in LIVE.items()
    for state in (*states, State.FENCING, State.CLOSED)
]


@pytest.mark.parametrize(("role", "state"), EVERY_STATE)
def test_bytes_that_are_no_frame(role: Role, state: State) -> None:
    duo = Duo()
    link = duo.to(role, state).link
    found = link.receive(b"\xc1garbage", duo.now)
    if state in OVER:
        assert found == []
    else:
        cause = next(effect for effect in found if isinstance(effect, effects.SessionLost)).cause
        assert cause.startswith("bad frame: ")
        assert found == end_of(state, cause, say=True)


@pytest.mark.parametrize(("role", "state"), EVERY_STATE)
@pytest.mark.parametrize("event", ["transport", "close", "fabric"])
def test_ends_from_outside(role: Role, state: State, event: str) -> None:
    duo = Duo()
    link = duo.to(role, state).link
    match event:
        case "transport":
            found, cause = link.transport_closed("reset", duo.now), "reset"
        case "close":
            found, cause = link.close("enough", duo.now), "enough"
        case _:
            found, cause = link.fabric_failed("no memory", duo.now), "fabric: no memory"
    if state in OVER:
        assert found == []
    else:
        assert found == end_of(state, cause, say=event != "transport")
    assert link.transport_closed("again", duo.now) == []


@pytest.mark.parametrize(("role", "state"), EVERY_STATE)
def test_late_and_early_facts_of_the_fabric(role: Role, state: State) -> None:
    """Facts that do not belong to the step change nothing; a death always counts."""
    duo = Duo()
    link = duo.to(role, state).link
    if state is not State.OPENING:
        assert link.session_opened(addresses(0), [scratch(0)], duo.now) == []
    if state not in (State.ANSWER, State.CONNECT):
        assert link.pair_connected((0, 0), duo.now) == []
    if state is not State.PROBE:
        assert link.pair_probed((0, 0), duo.now) == []
    if state is not State.UP:
        assert link.pair_fenced((0, 0), duo.now) == []
    assert link.state is state
    found = link.session_fenced(duo.now)
    if state is State.FENCING:
        assert found == [effects.Finished()]
    elif state in OPENED:
        cause = "the session was fenced on this node"
        assert found == [*end_of(state, cause, say=True), effects.Finished()]
    else:
        assert found == []
    assert link.session_fenced(duo.now) == []


@pytest.mark.parametrize(("role", "state"), EVERY_STATE)
def test_a_dead_connection(role: Role, state: State) -> None:
    duo = Duo()
    link = duo.to(role, state).link
    found = link.pair_lost((0, 0), "reset", duo.now)
    if state in OVER:
        assert found == []
    elif state is State.UP:
        cause = "all NIC pairs are lost, the last one (0, 0): reset"
        assert found == [effects.PairLost((0, 0), "reset"), *end_of(state, cause, say=True)]
    else:
        assert found == end_of(state, "NIC pair (0, 0): reset", say=True)


@pytest.mark.parametrize(("role", "state"), EVERY_STATE)
def test_every_step_has_a_deadline(role: Role, state: State) -> None:
    duo = Duo()
    link = duo.to(role, state).link
    assert link.tick(duo.now + 2.9, COUNTERS) == [] or state in SESSION_STEPS
    # Silence would come first where heartbeats run: the peer goes on sending them.
    if state in SESSION_STEPS:
        beat = SAMPLES[role][wire.Heartbeat]
        assert link.receive(wire.encode(beat), duo.now + 2.9) == []
    found = link.tick(duo.now + 5.0, COUNTERS)
    match state:
        case State.CLOSED:
            assert found == []
        case State.FENCING:
            assert [type(effect) for effect in found] == [effects.Warn]
            assert link.fence_late
            assert link.next_at is None
        case State.UP:
            assert [type(effect) for effect in found] == [effects.SendFrame]
        case _:
            assert found == end_of(state, f"no {state.value} within 5 s", say=True)
