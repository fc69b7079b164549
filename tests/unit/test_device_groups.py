"""Ranks whose memory each belongs to the NICs of a device group: pairs, and groups without NICs."""

from dataclasses import replace

import msgspec
import pytest

from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.carriers import Carriers
from pdnode.core.link_state import State
from pdnode.core.nics import joined_ranks, nic_pairs
from pdnode.types import Role
from tests.support.link_duo import COUNTERS, Duo, addresses, memory, scratch, up
from tests.support.link_nodes import GEOMETRY


def grouped(*groups: tuple[tuple[int, ...], list[int]]) -> list[wire.NicAddress]:
    """NICs of device groups, each with its ranks."""
    return [
        wire.NicAddress(one.nic, one.name, one.endpoint, ranks)
        for nics, ranks in groups
        for one in addresses(*nics)
    ]


TWO_BY_TWO = grouped(((0, 1), [0]), ((2, 3), [1]))


def test_each_group_meets_those_that_have_a_route_to_it() -> None:
    straight = {(0, 0), (1, 1)}
    assert nic_pairs(TWO_BY_TWO, TWO_BY_TWO, straight) == ((0, 0), (1, 1), (2, 2), (3, 3))
    every = {(d, p) for d in (0, 1) for p in (0, 1)}
    assert nic_pairs(TWO_BY_TWO, TWO_BY_TWO, every) == (
        (0, 0), (1, 1), (0, 2), (1, 3), (2, 0), (3, 1), (2, 2), (3, 3),
    )  # fmt: skip
    # A peer that has no groups meets all of them.
    assert nic_pairs(TWO_BY_TWO, addresses(5), straight) == ((0, 5), (1, 5), (2, 5), (3, 5))
    # Ranks that no plan knows leave nobody without a connection.
    assert nic_pairs(TWO_BY_TWO, addresses(5, 6), {(0, 0)}) != ()
    assert nic_pairs(TWO_BY_TWO, grouped(((4,), [9])), straight) == ((0, 4), (1, 4), (2, 4), (3, 4))


def test_the_pairs_of_many_groups_are_bounded_and_use_every_nic() -> None:
    many = grouped(*((tuple(range(4 * g, 4 * g + 4)), [g]) for g in range(16)))
    pairs = nic_pairs(many, many, {(d, p) for d in range(16) for p in range(16)})
    assert len(pairs) == len(set(pairs)) == wire.MAX_PAIRS


def test_routes_join_ranks_over_all_tp_groups() -> None:
    two, one = replace(GEOMETRY, tp=2), replace(GEOMETRY, tp=1)
    assert joined_ranks(two, two, decode_groups=1, prefill_groups=1) == {(0, 0), (1, 1)}
    assert joined_ranks(two, one, decode_groups=1, prefill_groups=1) == {(0, 0), (1, 0)}
    assert joined_ranks(one, two, decode_groups=2, prefill_groups=1) == {
        (0, 0), (0, 1), (1, 0), (1, 1),
    }  # fmt: skip
    assert joined_ranks(two, two, decode_groups=2, prefill_groups=2) == {
        (d + 2 * ours, d + 2 * theirs) for d in (0, 1) for ours in (0, 1) for theirs in (0, 1)
    }


def test_carriers_name_the_ranks_that_no_live_nic_reaches() -> None:
    carriers = Carriers([scratch(0, 1, 2), memory(0, 1), memory(2, rank=1)])
    assert carriers.want([(1, 7), (2, 7)]) is None
    assert carriers.want([(0, 7), (1, 7)]) == ((1,), {0, 1})
    assert carriers.want([(0, 7)]) is None, "asked for already"
    regions = [scratch(0, 1, 2), memory(0, 1), memory(1, 2, rank=1)]
    assert carriers.take(regions, [(0, 7), (1, 7)]) is None
    # With NIC 2 too: if it is coming back, it has the memory, and its `nic_up` did not say so.
    assert [(one.rank, [p.nic for p in one.pieces]) for one in carriers.lent] == [(1, [1, 2])]
    assert carriers.want([(2, 7)]) == ((0,), {2})
    assert "rank 0" in str(carriers.take(regions, [(2, 7)])), "nothing has come of it"


@pytest.mark.parametrize("got", [(0, 1), (0,)], ids=["after it got the memory", "before"])
def test_who_was_to_carry_may_be_lost_meanwhile(got: tuple[int, ...]) -> None:
    others = [memory(1, rank=1), memory(2, rank=2)]
    carriers = Carriers([scratch(0, 1, 2), memory(0), *others])
    assert carriers.want([(1, 7), (2, 7)]) == ((0,), {1, 2})
    assert carriers.take([scratch(1, 2), memory(*got), *others], [(2, 7)]) is None
    assert carriers.want([(2, 7)]) == ((0, 1), {2}), "the next one, and what was at home there"


def lose_group(duo: Duo, pair: tuple[int, int]) -> None:
    for role, end in duo.ends.items():
        end.log.clear()
        end.log += end.link.pair_lost(pair, "died", duo.now)
        duo.carry_out(role, end.link.pair_fenced(pair, duo.now))


def test_a_group_without_nics_is_carried_by_the_one_that_is_left() -> None:
    duo = up(split=True)
    assert duo.ends[Role.DECODE].link.live_pairs == {(0, 0), (1, 1)}
    lose_group(duo, (0, 0))
    decode = duo.ends[Role.DECODE]
    assert [one for one in decode.log if isinstance(one, effects.Carry)] == [
        effects.Carry((0,), frozenset({1}))
    ]
    assert not any(isinstance(one, effects.PairFenced) for one in decode.log), "not before"
    duo.advance()
    (told,) = (one for one in decode.log if isinstance(one, effects.PairFenced))
    assert told.pair == (0, 0)
    assert [(one.rank, [p.nic for p in one.pieces]) for one in told.lent] == [(0, [0, 1])]
    assert decode.link.state is State.UP

    # What the messenger sends then tells the prefill node where the rank is to be written to.
    prefill = duo.ends[Role.PREFILL]
    frame = wire.NicFenced((0, 0), list(told.lent))
    found = prefill.link.receive(wire.encode(frame), duo.now)
    known, delivered = found
    assert isinstance(known, effects.SetRemote)
    nics = {one.rank: sorted(piece.nic for piece in one.pieces) for one in known.regions}
    assert nics == {-1: [0, 1], 0: [0, 1], 1: [1]}
    assert delivered == effects.Deliver(frame)


def test_several_losses_wait_for_one_registration() -> None:
    duo = up(split=True)
    decode = duo.ends[Role.DECODE]
    lose_group(duo, (0, 0))
    again = decode.link.pair_fenced((0, 0), duo.now)
    assert again == [], "it is being seen to"
    found = decode.link.carried([scratch(0, 1), memory(0, size=0), memory(1, rank=1)], duo.now)
    assert isinstance(found[-2], effects.SendFrame | effects.CloseTransport)
    assert "rank 0 was registered with no other NIC" in decode.link.causes.get((9, 9), str(found))


def test_what_is_lent_outlasts_the_return_of_a_pair_that_had_asked_before() -> None:
    duo = up(split=True)
    prefill = duo.ends[Role.PREFILL].link
    lost = (1, 1)
    prefill.pair_lost(lost, "died", duo.now)
    prefill.pair_fenced(lost, duo.now)
    own = [scratch(1), memory(1, rank=1)]
    frame = wire.NicUp(lost, addresses(1)[0], bytes([9]) * 16, own)
    known, _ = prefill.receive(wire.encode(frame), duo.now)
    assert isinstance(known, effects.SetRemote)
    prefill.pair_fenced(lost, duo.now)
    lent = wire.NicFenced((0, 0), [memory(1)])
    known, _ = prefill.receive(wire.encode(lent), duo.now)
    assert isinstance(known, effects.SetRemote)
    assert {one.rank: {piece.nic for piece in one.pieces} for one in known.regions}[0] == {0, 1}
    found = prefill.session_opened(addresses(0, 1), [scratch(0, 1)], duo.now)
    assert [type(one) for one in found] == [effects.SendFrame], "nothing is replaced"


def test_a_pair_comes_back_no_sooner_than_its_fence_is_told() -> None:
    duo = up(split=True)
    duo.cooldowns.first_s = 1.0
    decode = duo.ends[Role.DECODE].link
    decode.pair_lost((0, 0), "died", duo.now)
    (carry,) = decode.pair_fenced((0, 0), duo.now)
    assert isinstance(carry, effects.Carry)
    found = decode.tick(duo.now + 2.0, COUNTERS)
    assert [type(one) for one in found] == [effects.SendFrame], "a heartbeat, no Reopen"
    assert decode.next_at is not None
    assert decode.next_at > duo.now + 2.0, "nothing is due"
    found = decode.carried([scratch(0, 1), memory(0, 1), memory(1, rank=1)], duo.now)
    assert [type(one) for one in found] == [effects.PairFenced]
    again = decode.tick(duo.now + 2.1, COUNTERS)
    assert [one.nic for one in again if isinstance(one, effects.Reopen)] == [0]


@pytest.mark.parametrize(
    ("regions", "text"),
    [
        ([memory(7)], "NIC 7 has no part in this session"),
        ([memory(1, rank=5)], "a rank is lent that this session has not"),
        ([memory(1, size=64)], "region of rank 0 on NIC 1 covers 64 bytes"),
    ],
)
def test_what_is_lent_must_hold(regions: list[wire.RegionDescriptor], text: str) -> None:
    duo = up(split=True)
    prefill = duo.ends[Role.PREFILL]
    frame = wire.NicFenced((0, 0), regions)
    prefill.log.clear()
    prefill.log += prefill.link.receive(wire.encode(frame), duo.now)
    assert text in prefill.lost().cause


def test_a_session_that_begins_without_a_group_has_it_carried() -> None:
    duo = Duo(split=True)
    duo.cooldowns.lost((0, 0), duo.now)
    duo.advance()
    decode, prefill = (duo.ends[role].link for role in (Role.DECODE, Role.PREFILL))
    assert decode.state is prefill.state is State.UP
    assert decode.live_pairs == {(1, 1)}
    (answer,) = (one for one in duo.ends[Role.DECODE].sent() if isinstance(one, wire.SessionAnswer))
    nics = {one.rank: sorted(piece.nic for piece in one.pieces) for one in answer.regions}
    assert nics[0] == [0, 1]


def test_an_older_peer_has_no_ranks_to_its_nics() -> None:
    data = msgspec.msgpack.encode([3, "nic3", b"host:1"])
    assert msgspec.msgpack.decode(data, type=wire.NicAddress).ranks == []
