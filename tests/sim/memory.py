"""The KV memory of a TP group, as marks: what a page holds says whose tokens are in it."""

from pdnode.core.geometry import KvGeometry

EMPTY = 0


def extend(mark: int, token: int) -> int:
    """The mark of a prefix that is one token longer. Integers hash alike in every process."""
    return hash((mark, token))


def mark_of(tokens: list[int]) -> int:
    mark = EMPTY
    for token in tokens:
        mark = extend(mark, token)
    return mark


class Memory:
    """`[rank, head of the rank, layer, page]`; a cell is the mark of the prefix that fills it.

    `may_land[page]` and `being_read[page]` count writes under way, for the checks on release.
    """

    def __init__(self, geometry: KvGeometry, *, writable: bool) -> None:
        self.geometry = geometry
        self.writable = writable  # by peers
        self.heads = geometry.heads_per_rank
        self.cells = [
            [[EMPTY] * geometry.pages for _ in range(geometry.layers)]
            for _ in range(geometry.tp * self.heads)
        ]
        self.may_land = [0] * geometry.pages
        self.being_read = [0] * geometry.pages
        self.life = [0] * geometry.pages  # rises whenever a page gets a new owner
        self.owned = [False] * geometry.pages
        self.granted: dict[str, dict[int, int]] = {}  # request key → page → its life then
