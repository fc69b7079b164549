"""The third step of a peer link: which NICs are joined, and whether the peer's descriptors hold."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from pdnode.core.geometry import KvGeometry
from pdnode.core.plan import routes
from pdnode.core.wire import (
    MAX_NICS,
    MAX_PAIRS,
    NicAddress,
    RegionDescriptor,
    RegionPiece,
    SessionAnswer,
)

SCRATCH_RANK = -1
PROBE_BYTES = 8

Pair = tuple[int, int]
RankPair = tuple[int, int]


def nic_pairs(
    decode: Sequence[NicAddress], prefill: Sequence[NicAddress], joined: Collection[RankPair]
) -> tuple[Pair, ...]:
    """(decode NIC, prefill NIC) of every connection. `joined`: ranks with a route between them.

    Each device group of the decode node meets those of the prefill node that write to it, in as
    many pairs as the one with more NICs has: in turn on both sides, so that every NIC of both has
    at least one and no two pairs are equal. Fewer where that were more than MAX_PAIRS.
    """
    assert 0 < len(decode) <= MAX_NICS
    assert 0 < len(prefill) <= MAX_NICS
    here, there = _by_group(decode), _by_group(prefill)
    meetings = [
        (here[ours], there[theirs])
        for ours in here
        for theirs in there
        if not ours or not theirs or any((d, p) in joined for d in ours for p in theirs)
    ]
    # Ranks that no plan has are no reason to do without a connection.
    meetings = meetings or [([nic.nic for nic in decode], [nic.nic for nic in prefill])]
    most = max(1, MAX_PAIRS // len(meetings))
    return tuple(
        (ours[turn % len(ours)], theirs[turn % len(theirs)])
        for ours, theirs in meetings
        for turn in range(min(most, max(len(ours), len(theirs))))
    )[:MAX_PAIRS]


def _by_group(nics: Sequence[NicAddress]) -> dict[tuple[int, ...], list[int]]:
    """NIC numbers of each device group, which its ranks tell apart."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for nic in nics:
        found[tuple(nic.ranks)].append(nic.nic)
    return found


def joined_ranks(
    decode: KvGeometry, prefill: KvGeometry, *, decode_groups: int, prefill_groups: int
) -> frozenset[RankPair]:
    """(decode rank, prefill rank) of every route, over all TP groups of both nodes."""
    found = {
        (route.destination_rank, holder)
        for route in routes(prefill, decode)
        for holder in route.holders
    }
    return frozenset(
        (ours * decode.tp + d, theirs * prefill.tp + p)
        for d, p in found
        for ours in range(decode_groups)
        for theirs in range(prefill_groups)
    )


def nics_objection(nics: Sequence[NicAddress]) -> str | None:
    numbers = [nic.nic for nic in nics]
    if len(set(numbers)) != len(numbers):
        return f"a NIC is named twice: {numbers}"
    return None


def answer_objection(
    answer: SessionAnswer, offered: Sequence[NicAddress], geometry: KvGeometry, groups: int
) -> str | None:
    """What is wrong with a decode node's answer to our offer, or None; it has so many TP groups."""
    if (twice := nics_objection(answer.nics)) is not None:
        return twice
    theirs = {nic.nic for nic in answer.nics}
    ours = {nic.nic for nic in offered}
    if len(set(answer.pairs)) != len(answer.pairs):
        return "a NIC pair is named twice"
    for pair in answer.pairs:
        if pair[0] not in theirs or pair[1] not in ours:
            return f"NIC pair {pair} names a NIC that was not offered"
    used = {pair[0] for pair in answer.pairs}
    return regions_objection(answer.regions, used, geometry, groups)


def regions_objection(
    regions: Sequence[RegionDescriptor],
    used: set[int],
    geometry: KvGeometry | None,
    groups: int = 1,
    *,
    reach: set[int] | None = None,
) -> str | None:
    """What is wrong with the peer's descriptors, or None.

    `used`: its NICs that are connected; each needs the scratch region. `geometry`: of each of the
    peer's `groups` when its KV memory is written to (then every rank must be reachable over one of
    `reach`, default `used`), else None.
    """
    reach = used if reach is None else reach
    ranks = [region.rank for region in regions]
    wanted = {SCRATCH_RANK, *range(geometry.tp * groups if geometry else 0)}
    if set(ranks) != wanted or len(ranks) != len(wanted):
        return f"regions of ranks {sorted(ranks)}, expected {sorted(wanted)}"
    for region in regions:
        by_nic: dict[int, list[RegionPiece]] = defaultdict(list)
        for piece in region.pieces:
            by_nic[piece.nic].append(piece)
        if region.rank == SCRATCH_RANK:
            if not used <= by_nic.keys():
                return f"no scratch region on NIC {min(used - by_nic.keys())}"
            need = PROBE_BYTES
        else:
            assert geometry is not None
            need = geometry.region_bytes
            if need and not reach & by_nic.keys():
                return f"rank {region.rank} is registered on none of the connected NICs"
        for nic, pieces in by_nic.items():
            covered = _covered(pieces)
            if covered is None or covered < need:
                return (
                    f"region of rank {region.rank} on NIC {nic} covers {covered or 0} bytes "
                    f"without a gap, {need} are needed"
                )
    return None


def _covered(pieces: list[RegionPiece]) -> int | None:
    """Bytes from offset 0 that the pieces cover, or None if they leave a gap or overlap."""
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset != end:
            return None
        end += piece.length
    return end
