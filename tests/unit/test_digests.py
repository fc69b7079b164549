"""Digests on the wire: cut into frames, put together again, compared."""

import pytest

from pdnode.core import wire
from pdnode.core.digests import Difference, SentDigests, frames

LAYERS = 3


def rows(pages: int, route: int) -> bytes:
    """Digests [page][layer] of one route, all different."""
    return b"".join(
        (route << 32 | page << 8 | layer).to_bytes(8, "little")
        for page in range(pages)
        for layer in range(LAYERS)
    )


def together(sent: list[wire.Sent], *, pages: int) -> SentDigests:
    said = SentDigests(pages, routes=2, layers=LAYERS)
    for frame in sent:
        assert said.add(frame.first, frame.digests) is None
    return said


def test_a_chunk_is_one_frame_and_its_routes_come_one_after_the_other() -> None:
    [frame] = frames("k", 4, [rows(5, 0), rows(5, 1)], layers=LAYERS)
    assert frame == wire.Sent("k", 4, rows(5, 0) + rows(5, 1))


def test_a_long_chunk_is_cut_at_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_DIGESTS_BYTES", 2 * 2 * LAYERS * 8 + 7)
    by_route = [rows(5, 0), rows(5, 1)]
    sent = frames("k", 0, by_route, layers=LAYERS)
    assert [(frame.first, len(frame.digests)) for frame in sent] == [(0, 96), (2, 96), (4, 48)]
    said = together(sent, pages=5)
    assert said.complete
    for route, whole in enumerate(by_route):
        assert b"".join(part.by_route[route] for part in said.parts) == whole


def test_frames_out_of_order_of_a_wrong_length_or_too_many_are_refused() -> None:
    said = SentDigests(pages=3, routes=2, layers=LAYERS)
    page = bytes(2 * LAYERS * 8)
    assert said.add(1, page) == "digests of pages 1 to 1: 0 are next"
    assert said.add(0, page[:-1]) == "digests: 47 bytes, a page has 48"
    assert said.add(0, 2 * page) is None
    assert said.add(2, 2 * page) == "digests of pages 2 to 3: 2 are next"
    assert (said.known, said.complete, len(said.parts)) == (2, False, 1)


def test_only_the_first_pages_are_compared_and_the_first_difference_is_named() -> None:
    said = together(
        frames("k", 0, [rows(2, 0), rows(2, 1)], layers=LAYERS)
        + frames("k", 2, [rows(3, 0), rows(3, 1)], layers=LAYERS),
        pages=5,
    )
    assert [(part.first, part.pages) for part in said.first_pages(2)] == [(0, 2)]
    assert list(said.first_pages(0)) == []
    first, second = said.first_pages(4)
    assert (second.first, second.pages, second.by_route[1]) == (2, 2, rows(3, 1)[: 2 * LAYERS * 8])
    assert said.difference(first, 1, rows(2, 1)) is None
    found = bytearray(second.by_route[1])
    for layer_of_page in (2, 3, 4):  # the last layer of a page, two of the next one
        found[8 * layer_of_page] ^= 0x80
    assert said.difference(second, 1, bytes(found)) == Difference(2, 2, 1, 3)
