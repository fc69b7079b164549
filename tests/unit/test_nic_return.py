"""NIC pairs that are lost while the session lives, and their way back."""

from dataclasses import replace

import pytest

from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.cooldown import Cooldowns
from pdnode.core.hello import wire_geometry
from pdnode.core.link_state import State
from pdnode.types import Role
from tests.support.link_duo import COUNTERS, SETTINGS, Duo, addresses, memory, scratch, up
from tests.support.link_nodes import GEOMETRY, hello

LOST = (1, 1)  # the same number on both sides
TWO = {Role.DECODE: (0, 1), Role.PREFILL: (0, 1)}


def lose(duo: Duo, *, fenced: tuple[Role, ...] = tuple(TWO)) -> None:
    """The pair dies, both messengers fence it, as they do."""
    for role, end in duo.ends.items():
        end.log.clear()
        end.log += end.link.pair_lost(LOST, "died", duo.now)
        if role in fenced:
            end.log += end.link.pair_fenced(LOST, duo.now)


def pass_time(duo: Duo, seconds: float) -> None:
    """In steps of a heartbeat, so that neither side takes the other for lost."""
    for _ in range(int(seconds / 0.5)):
        duo.now += 0.5
        for role, end in duo.ends.items():
            duo.carry_out(role, end.link.tick(duo.now, COUNTERS))
        duo.advance()


def of_kind(duo: Duo, role: Role, kind: type) -> list[object]:
    return [effect for effect in duo.ends[role].log if isinstance(effect, kind)]


def test_a_lost_pair_comes_back_after_its_cool_down() -> None:
    duo = up(nics=TWO)
    lose(duo)
    for role in TWO:
        assert of_kind(duo, role, effects.PairLost) == [effects.PairLost(LOST, "died")]
        assert of_kind(duo, role, effects.PairFenced) == [effects.PairFenced(LOST)]
        assert duo.ends[role].link.gone_pairs == [LOST]
    pass_time(duo, 29.5)
    assert not of_kind(duo, Role.DECODE, effects.Reopen)
    pass_time(duo, 0.5)
    for role in TWO:
        assert of_kind(duo, role, effects.PairUp) == [effects.PairUp(LOST)]
        assert duo.ends[role].link.live_pairs == {(0, 0), LOST}
        assert duo.ends[role].link.gone_pairs == []
        assert len(of_kind(duo, role, effects.Reopen)) == 1
        sent = [one for one in duo.ends[role].sent() if isinstance(one, wire.NicUp)]
        assert [one.pair for one in sent] == [LOST]
    # The new keys are those of this NIC; the other one's stay as they were.
    (known,) = of_kind(duo, Role.PREFILL, effects.SetRemote)
    assert isinstance(known, effects.SetRemote)
    assert {region.rank for region in known.regions} == {-1, 0}
    for region in known.regions:
        assert sorted(piece.nic for piece in region.pieces) == [0, 1]


def test_each_loss_doubles_the_cool_down_up_to_its_bound() -> None:
    cool = Cooldowns(30.0, 300.0)
    now, waits = 0.0, []
    for _ in range(6):
        until = cool.lost(LOST, now)
        waits.append(until - now)
        assert cool.lost(LOST, now + 1) == until, "it is out already"
        now = until + 5
        cool.back(LOST, now)
        now += 10
    assert waits == [30, 60, 120, 240, 300, 300]
    now += 300
    assert cool.lost(LOST, now) == now + 30, "it was back for long enough"
    assert cool.failed(LOST, now + 30) == now + 90


def test_what_went_with_the_whole_peer_is_forgiven() -> None:
    cool = Cooldowns(30.0, 300.0)
    cool.lost((0, 0), 10.0)
    cool.lost(LOST, 100.0)
    cool.forgive(97.0)
    assert cool.left_out([(0, 0), LOST, (2, 2)], 20.0) == {(0, 0): 40.0}
    assert cool.left_out([(0, 0)], 20.0) == {}, "a session needs a pair"
    assert cool.left_out([(0, 0), LOST], 40.0) == {}


def test_a_pair_that_keeps_a_session_from_coming_up_is_left_out_of_the_next() -> None:
    first = Duo(nics=TWO)
    first.to(Role.DECODE, State.CONNECT)
    first.ends[Role.DECODE].link.pair_lost(LOST, "no route", first.now)

    second = Duo(nics=TWO)
    second.cooldowns.lost(LOST, second.now - 1)
    second.advance()
    for role in TWO:
        assert second.ends[role].link.live_pairs == {(0, 0)}
    assert second.ends[Role.DECODE].link.gone_pairs == [LOST]
    pass_time(second, 29.5)
    assert second.ends[Role.DECODE].link.live_pairs == {(0, 0), LOST}
    assert second.ends[Role.PREFILL].link.live_pairs == {(0, 0), LOST}
    assert first.cooldowns.left_out([(0, 0), LOST], first.now) == {LOST: first.now + 30}


def test_an_attempt_that_never_connects_is_no_news_for_the_messenger() -> None:
    duo = up(nics=TWO)
    lose(duo)
    duo.ends[Role.DECODE].log.clear()
    link = duo.ends[Role.DECODE].link
    pass_time(duo, 29.5)
    duo.now += 0.5
    (reopen,) = [one for one in link.tick(duo.now, COUNTERS) if isinstance(one, effects.Reopen)]
    assert reopen == effects.Reopen(1, bytes([9]) * 16)
    nics, regions = addresses(0, 1), [scratch(0, 1), memory(0, 1)]
    (sent,) = link.session_opened(nics, regions, duo.now)
    assert sent == effects.SendFrame(
        wire.NicUp(LOST, nics[1], bytes([9]) * 16, [scratch(1), memory(1)])
    )
    answer = wire.NicUp(LOST, nics[1], bytes([9]) * 16, [scratch(1)])
    assert effects.Connect(LOST, nics[1].endpoint) in link.receive(wire.encode(answer), duo.now)
    assert link.pair_lost(LOST, "no route", duo.now) == [effects.FencePair(LOST)]
    assert link.pair_fenced(LOST, duo.now) == []
    assert link.gone_pairs == [LOST]
    assert duo.cooldowns.left_out([(0, 0), LOST], duo.now) == {LOST: duo.now + 60}


def test_an_attempt_that_fails_after_connecting_is_a_loss_like_any_other() -> None:
    """The peer may have probed the connection and written pages over it."""
    duo = up(nics=TWO)
    lose(duo)
    link = duo.ends[Role.DECODE].link
    pass_time(duo, 29.5)
    duo.now += 0.5
    link.tick(duo.now, COUNTERS)
    nics = addresses(0, 1)
    link.session_opened(nics, [scratch(0, 1), memory(0, 1)], duo.now)
    answer = wire.NicUp(LOST, nics[1], bytes([9]) * 16, [scratch(1)])
    link.receive(wire.encode(answer), duo.now)
    assert link.pair_connected(LOST, duo.now) == [effects.Probe()]
    assert link.pair_lost(LOST, "died", duo.now) == [effects.PairLost(LOST, "died")]
    assert link.pair_fenced(LOST, duo.now) == [effects.PairFenced(LOST)]


def test_a_fence_under_way_is_waited_for() -> None:
    duo = up(nics=TWO)
    lose(duo, fenced=(Role.DECODE,))
    prefill = duo.ends[Role.PREFILL].link
    frame = wire.NicUp(LOST, addresses(1)[0], bytes([9]) * 16, [scratch(1), memory(1)])
    known, fence = prefill.receive(wire.encode(frame), duo.now)
    assert isinstance(known, effects.SetRemote)
    assert fence == effects.FencePair(LOST)
    assert prefill.pair_fenced(LOST, duo.now) == [effects.Reopen(1, bytes([9]) * 16)]
    # That was the answer to the messenger's fence; the one to the link's own is no new loss.
    assert prefill.pair_fenced(LOST, duo.now) == []
    found = prefill.session_opened(addresses(0, 1), [scratch(0, 1)], duo.now)
    assert [type(one) for one in found] == [effects.SendFrame]


def test_with_rdm_a_prefill_node_knows_the_new_address_before_it_answers() -> None:
    duo = up(nics=TWO, settings=replace(SETTINGS, both_connect=True))
    lose(duo)
    prefill = duo.ends[Role.PREFILL].link
    frame = wire.NicUp(LOST, addresses(1)[0], bytes([9]) * 16, [scratch(1), memory(1)])
    prefill.receive(wire.encode(frame), duo.now)
    prefill.pair_fenced(LOST, duo.now)
    found = prefill.session_opened(addresses(0, 1), [scratch(0, 1)], duo.now)
    assert [type(one) for one in found] == [effects.Connect]
    answer = wire.NicUp(LOST, addresses(1)[0], bytes([9]) * 16, [scratch(1)])
    assert prefill.pair_connected(LOST, duo.now) == [
        effects.SendFrame(answer),
        effects.Probe(answer=True),
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"token": b"x" * 16}, "token: not that of this session"),
        ({"nic": addresses(0)[0]}, "NIC 0 is not that of the pair (1, 1)"),
        ({"pair": (1, 7)}, "NIC 7 of (1, 7) was not offered"),
        ({"regions": [scratch(1)]}, "rank 0 is registered with NIC 1 no more"),
        ({"regions": [memory(1)]}, "no scratch region on NIC 1"),
        ({"regions": [scratch(1), memory(1, size=64)]}, "region of rank 0 on NIC 1 covers 64"),
    ],
)  # fmt: skip
def test_a_nic_up_that_does_not_hold_ends_the_link(change: dict[str, object], text: str) -> None:
    duo = up(nics=TWO)
    lose(duo)
    fields: dict[str, object] = {
        "pair": LOST, "nic": addresses(1)[0], "token": bytes([9]) * 16,
        "regions": [scratch(1), memory(1)],
    }  # fmt: skip
    frame = wire.NicUp(**(fields | change))  # type: ignore[arg-type]
    prefill = duo.ends[Role.PREFILL]
    prefill.log.clear()
    prefill.log += prefill.link.receive(wire.encode(frame), duo.now)
    assert prefill.link.state is State.FENCING
    assert prefill.lost().cause.startswith(f"protocol: {text}")


def test_a_nic_of_a_peer_with_two_groups_returns_with_the_ranks_of_both() -> None:
    """Ranks are numbered over all TP groups: rank 1 is the second group's, not one too many."""
    geometry = wire_geometry(GEOMETRY, 2)
    hellos = {
        Role.DECODE: hello(Role.DECODE, geometry=geometry), Role.PREFILL: hello(Role.PREFILL),
    }  # fmt: skip
    duo = Duo(nics=TWO, hellos=hellos, ranks=2)
    duo.advance()
    lose(duo)
    pass_time(duo, 30.0)
    for role in TWO:
        assert duo.ends[role].link.state is State.UP
        assert duo.ends[role].link.live_pairs == {(0, 0), LOST}
