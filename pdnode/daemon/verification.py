"""What watches over the bytes of a node's KV pages: digests of what peers write, and canaries."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pdnode.core.digests import DIGEST_BYTES
from pdnode.core.geometry import KvGeometry
from pdnode.fabric._native import Fabric
from pdnode.memory.region import MemfdRegion
from pdnode.messenger.digests import Digester, PageVerifier

CANARY_S = 1.0
"""Between two looks at the canary pages."""

_PATTERN = b"\xff"  # not a number in every dtype: a canary that is read spoils the text, too


def choose_canaries(pages: int, wanted: int) -> list[int]:
    """Page numbers all over a pool of `pages`: `wanted`, but at most a quarter of it."""
    count = min(wanted, pages // 4)
    return [(2 * number + 1) * pages // (2 * count) for number in range(count)]


def fill_canaries(fd: int, geometry: KvGeometry, pages: Sequence[int]) -> None:
    """Write the pattern into these pages of a rank's region. Before anything is registered."""
    region = MemfdRegion.adopt(os.dup(fd), geometry.region_bytes)
    try:
        view = region.map()
        for layer in range(geometry.layers):
            for page in pages:
                start = layer * geometry.layer_stride + page * geometry.page_bytes
                view[start : start + geometry.page_bytes] = _PATTERN * geometry.page_bytes
    finally:
        region.close()


@dataclass(slots=True)
class Canaries:
    """Pages of one rank's region that nobody may write to."""

    digester: Digester
    verifier: PageVerifier
    region: int  # the core's number
    pages: Sequence[int]
    _known: bytes = b""  # their digests
    _looking: bool = False

    async def start(self, fd: int) -> None:
        """Fill them, in the worker's memory `fd`. Before a peer can write to it."""
        await asyncio.to_thread(fill_canaries, fd, self.digester.geometry, self.pages)
        self._known = await asyncio.to_thread(self._digests)

    def look(self) -> None:
        """Compare them, on the digest thread. A change is reported once."""
        if not self._looking:
            self._looking = True
            self.digester.run(self._digests, self._found)

    def _digests(self) -> bytes:
        page_bytes = self.digester.geometry.page_bytes
        return self.digester.digest(self.region, 0, page_bytes, self.pages)

    def _found(self, digests: bytes) -> None:
        self._looking = False
        before, self._known = self._known, digests
        layers = self.digester.geometry.layers
        changed = [
            (self.pages[at // DIGEST_BYTES // layers], at // DIGEST_BYTES % layers)
            for at in range(0, len(digests), DIGEST_BYTES)
            if digests[at : at + DIGEST_BYTES] != before[at : at + DIGEST_BYTES]
        ]
        self.verifier.report_canaries(len(self.pages), changed)

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(CANARY_S)


class Verification:
    """The digest thread of a node, and on a decode node what it compares."""

    def __init__(
        self, fabric: Fabric, geometry: KvGeometry, regions: Sequence[Sequence[int]]
    ) -> None:
        """`regions`: the core's region of each rank, by TP group."""
        self.digester = Digester(fabric, geometry)
        self.verifier = PageVerifier(self.digester, regions)
        self._watching: list[asyncio.Task[None]] = []

    async def watch(self, region: int, fd: int, pages: Sequence[int]) -> None:
        """Keep canaries in these pages of a rank's memory `fd`, if any are named."""
        if pages:
            canaries = Canaries(self.digester, self.verifier, region, pages)
            await canaries.start(fd)
            self._watching.append(asyncio.create_task(canaries.run()))

    def close(self) -> None:
        """Before the core is closed."""
        for task in self._watching:
            task.cancel()
        self.digester.close()
