"""Digests of the mapped memory, and what they show of a transfer over real libfabric."""

from collections.abc import Iterator

import pytest

from pdnode.core.digests import DIGEST_BYTES
from pdnode.fabric._native import FabricError
from tests.fabric.fabric_node import Node


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(pages=8, layers=3)
    made.fill(1)
    yield made
    made.close()


def digest(node: Node, pages: list[int], **changed: int) -> list[int]:
    given = {
        "region": node.region,
        "layers": node.layers,
        "layer_stride": node.layer_stride,
        "page_stride": node.page_bytes,
        "offset": 0,
        "length": node.page_bytes,
    }
    found = node.fabric.digest(**{**given, **changed}, pages=pages)
    return [
        int.from_bytes(found[at : at + DIGEST_BYTES], "little")
        for at in range(0, len(found), DIGEST_BYTES)
    ]


def test_it_is_xxh3_of_exactly_these_bytes(node: Node) -> None:
    node.memory[:3] = b"abc"
    # From the reference implementation: xxhsum -H3.
    assert digest(node, [0], layers=1, length=1) == [0xE6C632B61E964E1F]
    assert digest(node, [0], layers=1, length=3) == [0x78AF5F94892F3950]
    assert digest(node, [0], layers=1, offset=1, length=2) != digest(node, [0], layers=1, length=2)


def test_one_byte_changes_one_digest(node: Node) -> None:
    pages = [5, 0, 7]
    before = digest(node, pages)
    assert len(set(before)) == 9
    at = 2 * node.layer_stride + 7 * node.page_bytes + 4095
    node.memory[at] ^= 1
    after = digest(node, pages)
    assert [one != two for one, two in zip(before, after, strict=True)] == [False] * 8 + [True]
    half = digest(node, pages, length=2048)
    node.memory[at] ^= 1
    assert digest(node, pages, length=2048) == half
    assert digest(node, pages) == before


@pytest.mark.parametrize(
    ("pages", "changed"),
    [
        ([8], {}),
        ([-1], {}),
        ([0], {"layers": 4}),
        ([0], {"layers": 0}),
        ([0], {"offset": 1}),
        ([0], {"offset": -1}),
        ([0], {"length": 0}),
        ([0], {"page_stride": 0}),
        ([1 << 62], {"page_stride": 1, "length": 1}),
        ([7], {"layer_stride": 1 << 62}),
        ([0], {"region": 9}),
    ],
)
def test_what_is_outside_the_region_is_refused(
    node: Node, pages: list[int], changed: dict[str, int]
) -> None:
    with pytest.raises(FabricError):
        digest(node, pages, **changed)
