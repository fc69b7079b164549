"""Who holds what of a dimension that is cut over the ranks of a TP group. Imports no torch."""


def part_of(total: int, *, rank: int, tp: int) -> range:
    """The contiguous share of `rank`, equal but for the end, which may be short or empty."""
    share = -(-total // tp)
    return range(min(rank * share, total), min((rank + 1) * share, total))
