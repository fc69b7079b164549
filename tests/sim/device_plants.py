"""Planted faults of device groups: see plants.py."""

from collections.abc import Callable, Iterable
from typing import Any

from pdnode.core import transfer
from pdnode.core.link import Link
from pdnode.core.nic_return import NicReturns
from pdnode.core.nics import Pair
from pdnode.core.push import Push
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.session import PeerSession
from tests.sim.fabric import Core
from tests.sim.parts import Session, Transfer

Change = tuple[object, str, object]
Plant = Callable[[], list[Change]]


def drained_of_one_group() -> list[Change]:
    """The first device group is idle: `drained`, whatever the others still write."""

    def quiet(self: Core, found: Transfer) -> bool:
        return not any(
            write.transfer is found and not write.back
            for connection in found.session.connections.values()
            if self.group_of[connection.pair[1]] == 0
            for write in connection.writes
        )

    return [(Core, "quiet", quiet)]


def fenced_before_lent() -> list[Change]:
    """The peer hears of the fence before the memory has another NIC."""
    real = Link._cover

    def cover(self: Link, pairs: Iterable[Pair]) -> bool:
        real(self, pairs)
        return True

    return [(Link, "_cover", cover)]


def lent_not_told() -> list[Change]:
    """The descriptors of lent memory are not in the message."""
    real = PullMessenger.pair_fenced

    def pair_fenced(self: PullMessenger, session: PeerSession, pair: Pair) -> None:
        session.lent = ()
        real(self, session, pair)

    return [(PullMessenger, "pair_fenced", pair_fenced)]


def lending_ends_at_return() -> list[Change]:
    """A NIC of the memory's own group returns, so that the others give up their registration."""
    real = Core._open

    def reopen(self: Core, found: Session, group: int, *rest: Any) -> None:  # noqa: ANN401
        for region, other in found.carried:
            for keys in found.parts[other].registered.values():
                if self.homes[region] == group:
                    keys.pop(region, None)
        real(self, found, group, *rest)

    return [(Core, "_open", reopen)]


def lending_of_an_older_session() -> list[Change]:
    """What was lent in an earlier session is taken for lent in this one."""
    real = Core.descriptors
    seen: dict[tuple[Core, int, int], int] = {}

    def descriptors(self: Core, session: int) -> list[tuple[int, list[tuple[int, ...]]]]:
        def known(region: int, nic: int, key: int) -> int:
            lent = region >= 0 and self.group_of[nic] != self.homes[region]
            return seen.setdefault((self, region, nic), key) if lent else key

        return [
            (region, [(nic, *rest, known(region, nic, key)) for nic, *rest, key in pieces])
            for region, pieces in real(self, session)
        ]

    return [(Core, "descriptors", descriptors)]


def detour_to_nowhere() -> list[Change]:
    """A program goes out over whatever NICs are connected, if they reach the rank or not."""

    def reaching(self: PeerSession, rank: int) -> frozenset[int]:
        return frozenset(here for here, _ in self.pairs)

    return [(PeerSession, "reaching", reaching)]


def returned_before_told() -> list[Change]:
    """A pair is back before the peer has heard that it was fenced."""
    return [(NicReturns, "hold", lambda self, pair, *, until_told: None)]


def no_way_is_the_end() -> list[Change]:
    """A program without a way fails its request, although the decode node will regrant."""
    real = Push.transfer_failed

    def failed(self: Push, *rest: Any, stranded: bool, **more: Any) -> list[transfer.Effect]:  # noqa: ANN401
        return real(self, *rest, stranded=False, **more)

    return [(Push, "transfer_failed", failed)]


DEVICE_PLANTS: dict[str, Plant] = {
    "drained while one device group still writes": drained_of_one_group,
    "fence told before memory is lent": fenced_before_lent,
    "lent descriptors not in the message": lent_not_told,
    "lending ends when the group returns": lending_ends_at_return,
    "lending of an older session": lending_of_an_older_session,
    "detour over a group that does not reach": detour_to_nowhere,
    "pair back before its fence is told": returned_before_told,
    "no way out fails the request": no_way_is_the_end,
}
