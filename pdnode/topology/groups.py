"""Device groups: NICs that one progress thread drives, and which group is next to which."""

from collections.abc import Sequence

from pdnode.topology.host import Distance, Nic, distance


def nearest_groups(groups: Sequence[Sequence[Nic]]) -> tuple[tuple[int, ...], ...]:
    """For each group all of them, itself first, then by the distance of their NICs; equally near
    ones in turn, so that not all are carried by the first."""
    count = len(groups)

    def far(one: int, other: int) -> tuple[bool, Distance, int]:
        near = min(
            (distance(a.place, b.place) for a in groups[one] for b in groups[other]),
            default=Distance.SYS,
        )
        return one != other, near, (other - one) % count

    return tuple(
        tuple(sorted(range(count), key=lambda other: far(one, other))) for one in range(count)
    )
