"""Which NICs reach the memory of a decode node's ranks, and what becomes of a rank without any.

A rank's memory is registered with the NICs of its device group only. When the last of them is lost,
it is registered with those of another group, and only then does the peer hear that the pair is
fenced, in one message with the new descriptors. So every write that is asked for after a loss finds
a way, and one that was posted without one brings a replay.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdnode.core.nics import SCRATCH_RANK, Pair
from pdnode.core.wire import RegionDescriptor


@dataclass(slots=True)
class Carriers:
    """`regions`: our own descriptors of one session, of which pieces on lost NICs mean nothing.

    `fenced`: pairs whose fence is done and not told, because `asked` waits for its registration:
    the ranks, and the NICs that were live then. `lent`: ranks with further NICs, not told either.
    """

    regions: list[RegionDescriptor]
    fenced: list[Pair] = field(default_factory=list)
    asked: tuple[tuple[int, ...], frozenset[int]] | None = None
    lent: list[RegionDescriptor] = field(default_factory=list)

    def stranded(self, nics: Iterable[int]) -> tuple[int, ...]:
        """Ranks whose memory is registered with none of these NICs."""
        live = set(nics)
        return tuple(
            region.rank
            for region in self.regions
            if region.rank != SCRATCH_RANK
            and region.pieces
            and not any(piece.nic in live for piece in region.pieces)
        )

    def want(self, pairs: Iterable[Pair]) -> tuple[tuple[int, ...], frozenset[int]] | None:
        """Ranks that must be registered with some of these NICs, unless that is asked for already,
        if `pairs` are what is live."""
        nics = frozenset(pair[0] for pair in pairs)
        if self.asked is not None or not (ranks := self.stranded(nics)):
            return None
        self.asked = ranks, nics
        return self.asked

    def take(self, regions: list[RegionDescriptor], pairs: Iterable[Pair]) -> str | None:
        """What was asked for is there, or why it is not. `regions`: all our descriptors now;
        `pairs`: what is live. Where that is less than when it was asked for, the NICs that were to
        have the memory may be lost as well: `want` then says so."""
        assert self.asked is not None
        (ranks, nics), self.asked = self.asked, None
        self.regions = regions
        all_live = nics <= {pair[0] for pair in pairs}
        if all_live and (left := self.stranded(nics)):
            return f"the memory of rank {left[0]} was registered with no other NIC"
        # With all NICs: one that is just coming back has the memory too, and its peer may have
        # heard of it before it did.
        self.lent += [region for region in regions if region.rank in ranks]
        return None
