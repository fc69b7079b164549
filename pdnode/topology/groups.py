"""Device groups: NICs with a progress thread for some ranks' memory, and which is next to which."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from pdnode.topology.host import Distance, Nic, Place, distance

MAX_DEVICE_GROUPS = 16


@dataclass(frozen=True, slots=True)
class DeviceGroups:
    """The group of each rank, and of each NIC by its name. Every group has one of either."""

    ranks: tuple[int, ...]
    nics: Mapping[str, int]


def form_groups(
    gpus: Sequence[Place], own: Sequence[Set[str]], nics: Sequence[Nic]
) -> DeviceGroups:
    """Ranks that share a NIC are in one group; a rank without one joins the group that has its
    nearest, of equally near ones the one with the fewest ranks. Numbered by their first ranks;
    beyond MAX_DEVICE_GROUPS all are in the last.

    By rank: `gpus`, where its GPU sits, and `own`, names of the GPU's NICs; some rank has one.
    `nics`: all that are named there.
    """
    place_of = {nic.name: nic.place for nic in nics}
    parts: list[tuple[set[int], set[str]]] = []  # ranks, NICs
    for rank, names in enumerate(own):
        if names:
            met = [part for part in parts if part[1] & names]
            parts = [part for part in parts if part not in met]
            ranks, joined = {rank}, set(names)
            parts.append((ranks.union(*(p[0] for p in met)), joined.union(*(p[1] for p in met))))
    parts.sort(key=lambda part: min(part[0]))
    for rank, gpu in enumerate(gpus):
        if not own[rank]:
            ranks, _ = min(
                parts,
                key=lambda part: (
                    min(distance(gpu, place_of[name]) for name in part[1]), len(part[0]),
                ),
            )  # fmt: skip
            ranks.add(rank)
    parts.sort(key=lambda part: min(part[0]))
    group = [(min(number, MAX_DEVICE_GROUPS - 1), part) for number, part in enumerate(parts)]
    homes = {rank: number for number, (ranks, _) in group for rank in ranks}
    return DeviceGroups(
        tuple(homes[rank] for rank in range(len(gpus))),
        {name: number for number, (_, names) in group for name in names},
    )


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
