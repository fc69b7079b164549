"""Digests of pages, off the event loop: for a prefill node to send, for a decode node to compare.

One thread per node computes them, in order, in the compiled core and without the GIL: some 10 GB/s.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

from pdnode.core import wire
from pdnode.core.digests import DIGEST_BYTES, Difference, SentDigests, frames
from pdnode.core.geometry import KvGeometry
from pdnode.core.plan import Program, Route, routes
from pdnode.messenger.session import PeerSession
from pdnode.obs.log import event
from pdnode.obs.warnings import Condition

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class DigestFabric(Protocol):
    """`_native.Fabric`, of which any thread may call `digest`."""

    def digest(
        self,
        region: int,
        layers: int,
        layer_stride: int,
        page_stride: int,
        offset: int,
        length: int,
        pages: Sequence[int],
    ) -> bytes: ...


class Digester:
    """The node's digest thread."""

    def __init__(self, fabric: DigestFabric, geometry: KvGeometry) -> None:
        self._fabric = fabric
        self.geometry = geometry
        self._thread = ThreadPoolExecutor(1, "pdnode-digest")

    def digest(self, region: int, offset: int, length: int, pages: Sequence[int]) -> bytes:
        """[page][layer] of a piece of each page. Blocks: for the digest thread."""
        here = self.geometry
        return self._fabric.digest(
            region,
            here.layers,
            here.layer_stride,
            here.page_bytes,
            offset,
            length,
            pages,
        )

    def run(self, job: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """`job` on the thread, then `done` on the event loop. A job that raises is our mistake."""

        def finished(future: asyncio.Future[Result]) -> None:
            if future.cancelled():
                return  # the node is ending
            error = future.exception()
            assert error is None, f"a digest failed: {error}"
            done(future.result())

        future = asyncio.get_running_loop().run_in_executor(self._thread, job)
        future.add_done_callback(finished)

    def close(self) -> None:
        """Waits for the job that runs; before the core is closed."""
        self._thread.shutdown(cancel_futures=True)


@dataclass(slots=True)
class SourceDigests:
    """A prefill node's side of one request: `owed` pages have yet to be told of.

    `regions`: the core's region of each rank.
    """

    digester: Digester
    regions: Sequence[int]
    key: str
    owed: int
    planned: deque[Sequence[Program]] = field(default_factory=deque)  # by chunk, not computed yet
    next_page: int = 0

    def computed(self, told: Callable[[list[wire.Sent]], None]) -> None:
        """The next planned chunk is computed: `told` will get its `sent` messages."""
        found = self.planned.popleft()

        def job() -> list[bytes]:
            return [
                b"".join(self._program(program) for program in same)
                for _, same in groupby(found, lambda p: (p.destination_rank, p.destination_offset))
            ]

        def done(by_route: list[bytes]) -> None:
            layers = self.digester.geometry.layers
            made = frames(self.key, self.next_page, by_route, layers=layers)
            pages = len(by_route[0]) // (layers * DIGEST_BYTES)
            self.next_page += pages
            self.owed -= pages
            told(made)

        if found:
            self.digester.run(job, done)

    def _program(self, program: Program) -> bytes:
        pages = [page for at, _, count in program.spans for page in range(at, at + count)]
        region = self.regions[program.source_rank]
        return self.digester.digest(region, program.source_offset, program.length, pages)


@dataclass(slots=True)
class VerifyFigures:
    """Counters since start, by when: completion, release, canary."""

    pages: dict[str, int] = field(default_factory=dict)
    mismatches: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PullDigests:
    """A decode node's side of one request. `again`: pages that are compared when it ends."""

    said: SentDigests
    regions: Sequence[int]  # the core's region of each rank
    plan: tuple[Route, ...]
    pages: list[int]
    again: int
    ending: bool = False


class PageMismatch(NamedTuple):
    page: int
    difference: Difference
    rank: int


class PageVerifier:
    """Compares a decode node's pages with what the peers said that they sent.

    `regions`: the core's region of each rank, by TP group.
    """

    def __init__(self, digester: Digester, regions: Sequence[Sequence[int]]) -> None:
        self._digester = digester
        self._regions = regions
        self.figures = VerifyFigures()
        self._last: dict[str, str] = {}  # by subject: what was found last

    def expect(
        self, source: KvGeometry, pages: list[int], *, group: int, again: int
    ) -> PullDigests:
        """`pages`: those that the peer fills, of this node's `group`."""
        plan = routes(source, self._digester.geometry)
        said = SentDigests(len(pages), len(plan), self._digester.geometry.layers)
        return PullDigests(said, self._regions[group], plan, pages, again)

    def check(
        self, digests: PullDigests, count: int, done: Callable[[PageMismatch | None], None]
    ) -> None:
        """Compare the first `count` pages. The caller holds them, and reports what is found."""
        self._digester.run(lambda: self._compare(digests, count), done)

    def report(
        self,
        when: str,
        checked: int,
        found: PageMismatch | None,
        *,
        session: PeerSession,
        request_id: str,
    ) -> str:
        """Count, and log and warn of a mismatch; in words what differs, or an empty text."""
        self._count(when, checked, found is not None)
        if found is None:
            return ""
        page, (index, layer, _, count), rank = found
        text = (
            f"page {page} (number {index} of the prompt), layer {layer}, rank {rank}: not what was "
            f"written ({count} digests differ, seen at {when})"
        )
        event(
            _log, logging.ERROR, "kv.mismatch", "KV pages differ from what was sent",
            req=wire.clip(request_id), peer=session.node, page=page, layer=layer, rank=rank,
            digests=count, when=when,
        )  # fmt: skip
        self._last[session.node] = f"from {session.node}: {text}"
        return text

    def report_canaries(self, checked: int, changed: list[tuple[int, int]]) -> None:
        """`changed`: (page, layer) that nobody may write to and somebody did."""
        self._count("canary", checked, bool(changed))
        if changed:
            page, layer = changed[0]
            text = f"canary page {page}, layer {layer} was written to ({len(changed)} in all)"
            event(
                _log, logging.ERROR, "kv.canary", "a page that nobody may write to has changed",
                page=page, layer=layer, pages=len(changed),
            )  # fmt: skip
            self._last["canary"] = text

    def conditions(self) -> list[Condition]:
        """For the warnings: what was found since start does not go away."""
        return [Condition("E130", text, subject) for subject, text in self._last.items()]

    def _count(self, when: str, checked: int, wrong: bool) -> None:
        figures = self.figures
        figures.pages[when] = figures.pages.get(when, 0) + checked
        figures.mismatches[when] = figures.mismatches.get(when, 0) + wrong

    def _compare(self, digests: PullDigests, count: int) -> PageMismatch | None:
        """On the digest thread. The first part and route with a difference is enough."""
        for part in digests.said.first_pages(count):
            pages = digests.pages[part.first : part.first + part.pages]
            for number, route in enumerate(digests.plan):
                region = digests.regions[route.destination_rank]
                found = self._digester.digest(region, route.destination_offset, route.length, pages)
                difference = digests.said.difference(part, number, found)
                if difference is not None:
                    page = digests.pages[difference.page]
                    return PageMismatch(page, difference, route.destination_rank)
        return None
