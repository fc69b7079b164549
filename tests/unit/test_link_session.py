"""The session step and life after it: order, descriptors, heartbeats, pairs, fences."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.heartbeat import Counters, Liveness
from pdnode.core.link import Link
from pdnode.core.link_state import State
from pdnode.core.nics import nic_pairs
from pdnode.types import Role
from tests.support.link_duo import (
    COUNTERS,
    SETTINGS,
    Duo,
    addresses,
    memory,
    scratch,
    up,
)
from tests.support.link_nodes import GEOMETRY, hello

P_BOOT = hello(Role.PREFILL).boot
D_BOOT = hello(Role.DECODE).boot


def kinds(found: Sequence[effects.Effect]) -> list[str]:
    """Effects by name, frames by their tag."""
    return [
        wire.tag(one.frame) if isinstance(one, effects.SendFrame) else type(one).__name__
        for one in found
    ]


# order


def test_the_order_of_a_session_on_both_sides() -> None:
    duo = up()
    assert kinds(duo.ends[Role.DECODE].log) == [
        "auth",
        "Admit",
        "auth_proof",
        "hello",
        "OpenSession",
        "Connect",
        "session_answer",
        "SetRemote",
        "Probe",
        "probed",
        "SessionUp",
    ]
    assert kinds(duo.ends[Role.PREFILL].log) == [
        "auth_reply",
        "Admit",
        "hello",
        "OpenSession",
        "session_offer",
        "SetRemote",
        "session_ready",
        "Probe",
        "probed",
        "SessionUp",
    ]


def test_with_rdm_both_sides_connect() -> None:
    duo = Duo(settings=replace(SETTINGS, both_connect=True))
    duo.advance()
    connects = [one for one in duo.ends[Role.PREFILL].log if isinstance(one, effects.Connect)]
    assert connects == [effects.Connect((0, 0), b"host:7700")]
    # The decode node may have answered before its fabric knew our address: its probe says so.
    for role, answer in ((Role.PREFILL, True), (Role.DECODE, False)):
        probes = [one for one in duo.ends[role].log if isinstance(one, effects.Probe)]
        assert probes == [effects.Probe(answer)]


def test_a_connection_may_overtake_the_answer() -> None:
    duo = Duo()
    end = duo.to(Role.PREFILL, State.ANSWER)
    assert end.link.pair_connected((0, 0), duo.now) == []
    duo.advance()
    assert end.link.state is State.UP


def test_a_connection_that_the_answer_does_not_name() -> None:
    duo = Duo()
    end = duo.to(Role.PREFILL, State.ANSWER)
    end.log += end.link.pair_connected((5, 5), duo.now)
    duo.advance()
    assert "a NIC pair is connected that the answer does not name" in end.lost().cause


def test_no_side_is_up_before_all_pairs_are_probed_both_ways() -> None:
    duo = Duo(nics={Role.DECODE: (0, 1), Role.PREFILL: (0, 1)})
    decode = duo.to(Role.DECODE, State.PROBE)
    assert decode.link.pair_probed((0, 0), duo.now) == []
    assert decode.link.receive(wire.encode(wire.Probed(P_BOOT)), duo.now) == []
    assert decode.link.state is State.PROBE
    found = decode.link.pair_probed((1, 1), duo.now)
    assert kinds(found) == ["probed", "SessionUp"]


@pytest.mark.parametrize(
    ("decode", "prefill", "pairs"),
    [
        ([0], [0], ((0, 0),)),
        ([0, 1], [4], ((0, 4), (1, 4))),
        ([3], [0, 1, 2], ((3, 0), (3, 1), (3, 2))),
        ([0, 1], [0, 1, 2], ((0, 0), (1, 1), (0, 2))),
        ([0, 1, 2, 3], [7, 8, 9], ((0, 7), (1, 8), (2, 9), (3, 7))),
    ],
)
def test_nic_pairs(
    decode: list[int], prefill: list[int], pairs: tuple[tuple[int, int], ...]
) -> None:
    assert nic_pairs(addresses(*decode), addresses(*prefill), ()) == pairs


# ghosts and forgeries


def answer(**changes: object) -> wire.SessionAnswer:
    fields = {
        "boot": D_BOOT,
        "nics": addresses(0),
        "pairs": [(0, 0)],
        "regions": [scratch(0), memory(0)],
        **changes,
    }
    return wire.SessionAnswer(**fields)  # type: ignore[arg-type]


def piece(offset: int, length: int) -> wire.RegionPiece:
    return wire.RegionPiece(0, offset, length, 0, 1)


HALF = GEOMETRY.region_bytes // 2


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        (answer(boot="ghost"), f"boot id ghost, the hello said {D_BOOT}"),
        (answer(nics=addresses(0, 0)), "a NIC is named twice: [0, 0]"),
        (answer(pairs=[(0, 0), (0, 0)]), "a NIC pair is named twice"),
        (answer(pairs=[(0, 3)]), "NIC pair (0, 3) names a NIC that was not offered"),
        (answer(pairs=[(3, 0)]), "NIC pair (3, 0) names a NIC that was not offered"),
        (answer(regions=[scratch(0)]), "regions of ranks [-1], expected [-1, 0]"),
        (answer(regions=[memory(0)]), "regions of ranks [0], expected [-1, 0]"),
        (
            answer(regions=[scratch(0), memory(0), memory(0)]),
            "regions of ranks [-1, 0, 0], expected [-1, 0]",
        ),
        (answer(regions=[scratch(1), memory(0)]), "no scratch region on NIC 0"),
        (
            answer(regions=[scratch(0), memory(1)]),
            "rank 0 is registered on none of the connected NICs",
        ),
        (
            answer(regions=[scratch(0), memory(0, size=HALF)]),
            f"region of rank 0 on NIC 0 covers {HALF} bytes without a gap, "
            f"{GEOMETRY.region_bytes} are needed",
        ),
        (
            answer(
                regions=[
                    scratch(0),
                    wire.RegionDescriptor(0, [piece(0, HALF), piece(HALF + 1, HALF)]),
                ]
            ),
            f"region of rank 0 on NIC 0 covers 0 bytes without a gap, "
            f"{GEOMETRY.region_bytes} are needed",
        ),
    ],
)
def test_a_forged_answer_is_refused_before_the_fabric_sees_it(
    frame: wire.SessionAnswer, cause: str
) -> None:
    duo = Duo()
    end = duo.to(Role.PREFILL, State.ANSWER)
    end.log.clear()
    end.log += end.link.receive(wire.encode(frame), duo.now)
    assert kinds(end.log) == ["Fence", "SessionLost", "bye", "CloseTransport"]
    assert end.lost().cause == f"protocol: {cause}"


def test_an_answer_in_pieces_is_taken() -> None:
    duo = Duo()
    end = duo.to(Role.PREFILL, State.ANSWER)
    whole = wire.RegionDescriptor(0, [piece(HALF, HALF), piece(0, HALF)])
    found = end.link.receive(wire.encode(answer(regions=[whole, scratch(0)])), duo.now)
    assert found == [effects.SetRemote((whole, scratch(0)))]


@pytest.mark.parametrize(
    ("role", "state", "frame"),
    [
        (Role.DECODE, State.OFFER, wire.SessionOffer("ghost", b"t" * 16, addresses(0))),
        (Role.DECODE, State.CONNECT, wire.SessionReady("ghost", [scratch(0)])),
        (Role.DECODE, State.PROBE, wire.Probed("ghost")),
        (Role.PREFILL, State.PROBE, wire.Probed("ghost")),
        (Role.DECODE, State.UP, wire.Heartbeat("ghost", 1, 0, 0.0, 0, False, 0, 0, 0)),
        (Role.DECODE, State.UP, wire.Drained("ghost:1", 0.0, 0.0)),
        (Role.DECODE, State.UP, wire.Accepted("1", 0)),
        (Role.PREFILL, State.UP, wire.Cancel("ghost:1")),
        (Role.PREFILL, State.UP, wire.Cancel(f"{D_BOOT}:x:1")),
    ],
)
def test_a_message_of_another_incarnation_ends_the_link(
    role: Role, state: State, frame: wire.Frame
) -> None:
    duo = Duo()
    end = duo.to(role, state)
    end.log += end.link.receive(wire.encode(frame), duo.now)
    assert end.lost().cause.startswith("protocol: ")
    assert "boot id" in end.lost().cause
    assert not any(isinstance(one, effects.Deliver) for one in end.log)


@pytest.mark.parametrize(
    ("regions", "cause"),
    [
        ([scratch(5)], "no scratch region on NIC 0"),
        ([scratch(0), memory(0)], "regions of ranks [-1, 0], expected [-1]"),
        (
            [wire.RegionDescriptor(-1, [piece(0, 4)])],
            "region of rank -1 on NIC 0 covers 4 bytes without a gap, 8 are needed",
        ),
    ],
)
def test_a_forged_ready(regions: list[wire.RegionDescriptor], cause: str) -> None:
    duo = Duo()
    end = duo.to(Role.DECODE, State.CONNECT)
    end.log += end.link.receive(wire.encode(wire.SessionReady(P_BOOT, regions)), duo.now)
    assert end.lost().cause == f"protocol: {cause}"


def test_a_second_ready_and_a_second_probed_are_out_of_place() -> None:
    for state, frame in (
        (State.CONNECT, wire.SessionReady(P_BOOT, [scratch(0, 1)])),
        (State.PROBE, wire.Probed(P_BOOT)),
    ):
        duo = Duo(nics={Role.DECODE: (0, 1), Role.PREFILL: (0, 1)})
        end = duo.to(Role.DECODE, state)
        end.log += end.link.receive(wire.encode(frame), duo.now)
        assert end.link.state is state
        end.log += end.link.receive(wire.encode(frame), duo.now)
        assert f"{wire.tag(frame)} from a prefill node" in end.lost().cause


# heartbeats


def beat(sequence: int, **changes: object) -> wire.Heartbeat:
    fields: dict[str, object] = {
        "boot": P_BOOT,
        "sequence": sequence,
        "echo": 0,
        "echo_delay_s": 0.0,
        "steps": 0,
        "step_busy": False,
        "core": 0,
        "waiting_tokens": 0,
        "free_pages": 0,
        **changes,
    }
    return wire.Heartbeat(**fields)  # type: ignore[arg-type]


def hear(link: Link, now: float, frame: wire.Frame) -> list[effects.Effect]:
    return link.receive(wire.encode(frame), now)


def test_heartbeats_go_out_every_interval_and_echo_with_a_duration() -> None:
    duo = up()
    link = duo.ends[Role.DECODE].link
    counters = Counters(steps=7, step_busy=True, core=8, waiting_tokens=9, free_pages=10)
    assert link.next_at == 100.0
    (sent,) = link.tick(100.0, counters)
    assert sent == effects.SendFrame(wire.Heartbeat(D_BOOT, 1, 0, 0.0, 7, True, 8, 9, 10))
    assert link.next_at == 100.5
    assert link.tick(100.4, counters) == []
    hear(link, 100.25, beat(1, echo=1, echo_delay_s=0.125))
    assert link.rtt_s == pytest.approx(0.125)
    (sent,) = link.tick(100.5, counters)
    assert isinstance(sent, effects.SendFrame)
    assert isinstance(sent.frame, wire.Heartbeat)
    assert (sent.frame.echo, sent.frame.echo_delay_s) == (1, 0.25)


@pytest.mark.parametrize(
    ("frames", "cause"),
    [
        ([beat(2)], "heartbeat 2, expected 1"),
        ([beat(1), beat(1)], "heartbeat 1, expected 2"),
        ([beat(1, echo=1)], "heartbeat echoes 1, 0 were sent"),
    ],
)
def test_invented_heartbeats(frames: list[wire.Heartbeat], cause: str) -> None:
    duo = up()
    end = duo.ends[Role.DECODE]
    for frame in frames:
        end.log += hear(end.link, duo.now, frame)
    assert end.lost().cause == f"protocol: {cause}"


def test_silence_loses_the_link_and_any_frame_breaks_it() -> None:
    duo = up()
    end = duo.ends[Role.DECODE]
    end.log.clear()
    assert hear(end.link, 102.0, wire.Drain()) == [effects.Deliver(wire.Drain())]
    assert kinds(end.link.tick(104.9, COUNTERS)) == ["heartbeat"]
    end.log += end.link.tick(105.0, COUNTERS)
    assert kinds(end.log) == ["Fence", "SessionLost", "bye", "CloseTransport"]
    assert end.lost() == effects.SessionLost("silent for 3 s", False, silent=True)
    assert end.link.session_fenced(105.1) == [effects.Finished()]
    assert end.link.next_at is None


def test_silence_counts_during_the_session_steps_too() -> None:
    duo = Duo()
    end = duo.to(Role.PREFILL, State.OPENING)
    assert kinds(end.link.tick(duo.now, COUNTERS)) == ["heartbeat"]
    end.log += end.link.tick(duo.now + 3.0, COUNTERS)
    assert end.lost().cause == "silent for 3 s"


def liveness() -> Liveness:
    return Liveness(0.0, heartbeat_s=0.5, link_lost_s=3.0, stall_s=30.0)


@pytest.mark.parametrize(
    ("moves", "stalled"),
    [
        ({}, True),
        ({"steps": 1}, False),
        ({"core": 1}, False),
        ({"waiting_tokens": 5, "free_pages": 3}, True),  # these say nothing of progress
        ({"step_busy": False}, False),
    ],
)
def test_what_counts_as_progress(moves: dict[str, object], stalled: bool) -> None:
    watch = liveness()
    for sequence in range(1, 62):
        now = 0.5 * (sequence - 1)
        changes: dict[str, object] = {"step_busy": True, **(moves if sequence >= 40 else {})}
        report = watch.take(beat(sequence, **changes), now)
        if sequence < 61:
            assert report is None
    assert watch.stalled is stalled
    assert (report == "progress stalled: busy in pass 0 for 30 s") is stalled


def test_progress_resumed_is_told_once() -> None:
    duo = up(settings=replace(SETTINGS, stall_s=1.0))
    link = duo.ends[Role.DECODE].link
    found = [hear(link, 100.0 + 0.5 * n, beat(n, step_busy=True, steps=3)) for n in range(1, 6)]
    stalled = effects.Warn("progress stalled: busy in pass 3 for 1 s")
    assert found == [[], [], [stalled], [], []]
    assert link.stalled
    assert hear(link, 103.0, beat(6, step_busy=True, steps=4)) == [effects.Warn("progress resumed")]
    assert not link.stalled


# pairs and the end


def test_a_pair_that_dies_or_is_fenced_leaves_the_others() -> None:
    duo = up(nics={Role.DECODE: (0, 1, 2), Role.PREFILL: (0,)})
    end = duo.ends[Role.DECODE]
    end.log.clear()
    assert end.link.live_pairs == {(0, 0), (1, 0), (2, 0)}
    assert end.link.pair_lost((1, 0), "reset", duo.now) == [effects.PairLost((1, 0), "reset")]
    assert end.link.pair_lost((1, 0), "reset", duo.now) == []
    assert end.link.pair_fenced((1, 0), duo.now) == [effects.PairFenced((1, 0))]
    assert end.link.pair_fenced((0, 0), duo.now) == [effects.PairFenced((0, 0))]
    assert end.link.state is State.UP
    end.log += end.link.pair_fenced((2, 0), duo.now)
    assert kinds(end.log) == ["PairFenced", "Fence", "SessionLost", "bye", "CloseTransport"]
    assert end.lost().cause == "all NIC pairs are fenced"


def test_drain_is_told_when_up_and_only_when_it_changes() -> None:
    duo = Duo()
    prefill = duo.ends[Role.PREFILL]
    assert prefill.link.drain(True) == []
    duo.advance()
    assert kinds(prefill.log)[-2:] == ["SessionUp", "drain"]
    assert duo.ends[Role.DECODE].link.draining
    assert prefill.link.drain(True) == []
    duo.carry_out(Role.PREFILL, prefill.link.drain(False))
    duo.advance()
    assert not duo.ends[Role.DECODE].link.draining


def test_a_session_that_could_not_be_opened_needs_no_fence() -> None:
    duo = Duo()
    end = duo.to(Role.PREFILL, State.OPENING)
    end.log.clear()
    end.log += end.link.fabric_failed("no such NIC", duo.now, opened=False)
    assert kinds(end.log) == ["SessionLost", "bye", "CloseTransport", "Finished"]


def test_nothing_is_sent_after_the_bye() -> None:
    duo = up()
    end = duo.ends[Role.PREFILL]
    end.link.close("enough", duo.now)
    assert end.link.drain(True) == []
    assert end.link.tick(duo.now + 1.0, COUNTERS) == []
    assert hear(end.link, duo.now, beat(1, boot=D_BOOT)) == []
