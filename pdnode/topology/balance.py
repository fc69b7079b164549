"""Deals items out to bins so that the loads of the bins are as even as can be."""

from collections import deque
from collections.abc import Mapping, Sequence


def balance(
    choices: Mapping[str, Sequence[str]], *, base: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Item → bin, each one of its `choices` (none of them empty).

    `base` is what the bins hold already. An optimal semi-matching: every item goes to the least
    loaded bin that can be reached by moving earlier items on, so that no move of any chain of items
    would make the loads more even (Harvey et al., "Semi-matchings for bipartite graphs", 2006).
    Equal choices are taken in their order.
    """
    load = {name: 0 for names in choices.values() for name in names}
    load |= {name: count for name, count in (base or {}).items() if name in load}
    held: dict[str, list[str]] = {name: [] for name in load}
    for item in choices:
        bin_from: dict[str, tuple[str, str | None]] = {}  # bin ← (item that moves in, its old bin)
        queue: deque[tuple[str, str | None]] = deque([(item, None)])
        order: list[str] = []
        while queue:
            mover, old = queue.popleft()
            for name in choices[mover]:
                if name not in bin_from:
                    bin_from[name] = (mover, old)
                    order.append(name)
                    queue.extend((other, name) for other in held[name])
        target: str | None = min(order, key=lambda name: load[name])
        assert target is not None
        load[target] += 1
        while target is not None:
            mover, old = bin_from[target]
            held[target].append(mover)
            if old is not None:
                held[old].remove(mover)
            target = old
    return {item: name for name, items in held.items() for item in items}
