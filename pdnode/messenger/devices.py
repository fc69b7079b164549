"""The device groups of this node: which NICs each has, and who stands in for one without any."""

from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Devices:
    """Groups are numbered as in the core. `nics`: NIC numbers of each. `near`: for each group all
    groups, itself first, then the nearest."""

    nics: tuple[frozenset[int], ...]
    near: tuple[tuple[int, ...], ...]

    def carrier(self, group: int, usable: Set[int]) -> int | None:
        """The nearest group to `group` that has one of these NICs."""
        return next((one for one in self.near[group] if self.nics[one] & usable), None)

    def group_of(self, nic: int) -> int:
        return next(number for number, nics in enumerate(self.nics) if nic in nics)


ONE_GROUP = Devices((frozenset(range(64)),), ((0,),))
"""All NICs together."""
