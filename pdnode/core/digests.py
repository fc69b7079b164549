"""Digests of pages on their way: how they are cut into frames, put together and compared. Pure.

A digest is the xxh3-64 of one page of one layer over one route (core/plan.py). Digests of some
pages lie in the order `[route][page][layer]`, routes as `plan.routes` orders them, 8 bytes each:
the core (fabric) computes those of many pages of one route in one call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdnode.core import wire

DIGEST_BYTES = 8


class Difference(NamedTuple):
    """What the first digest that differs belongs to. `page` counts in the request's pages."""

    page: int
    layer: int
    route: int
    wrong: int  # digests that differ, this one among them


def frames(key: str, first: int, by_route: Sequence[bytes], *, layers: int) -> list[wire.Sent]:
    """The `sent` messages for neighbouring pages from index `first` on."""
    row = layers * DIGEST_BYTES
    pages = len(by_route[0]) // row
    most = max(1, wire.MAX_DIGESTS_BYTES // (row * len(by_route)))
    return [
        wire.Sent(
            key,
            first + start,
            b"".join(one[start * row : (start + most) * row] for one in by_route),
        )
        for start in range(0, pages, most)
    ]


class Part(NamedTuple):
    """Digests of `pages` neighbouring pages from index `first` on, by route."""

    first: int
    pages: int
    by_route: tuple[bytes, ...]


@dataclass(slots=True)
class SentDigests:
    """What a peer has said of the `pages` pages of one request. Frames must come in order."""

    pages: int
    routes: int
    layers: int
    known: int = 0
    parts: list[Part] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.known == self.pages

    def add(self, first: int, digests: bytes) -> str | None:
        """Take one `sent`; what is wrong with it, or None."""
        row = self.layers * DIGEST_BYTES
        count, rest = divmod(len(digests), row * self.routes)
        if rest:
            return f"digests: {len(digests)} bytes, a page has {row * self.routes}"
        if first != self.known or first + count > self.pages:
            return f"digests of pages {first} to {first + count - 1}: {self.known} are next"
        cuts = [digests[at * count * row : (at + 1) * count * row] for at in range(self.routes)]
        self.parts.append(Part(first, count, tuple(cuts)))
        self.known += count
        return None

    def first_pages(self, count: int) -> Iterator[Part]:
        """The parts, cut off after the first `count` pages."""
        row = self.layers * DIGEST_BYTES
        for first, there, by_route in self.parts:
            left = min(there, count - first)
            if left > 0:
                yield Part(first, left, tuple(one[: left * row] for one in by_route))

    def difference(self, part: Part, route: int, found: bytes) -> Difference | None:
        """Where `found`, digests of the part's pages as they are here, differs on this route."""
        said = part.by_route[route]
        if found == said:
            return None
        at = range(0, len(said), DIGEST_BYTES)
        wrong = [i for i in at if found[i : i + DIGEST_BYTES] != said[i : i + DIGEST_BYTES]]
        page, layer = divmod(wrong[0] // DIGEST_BYTES, self.layers)
        return Difference(part.first + page, layer, route, len(wrong))
