"""The daemon's side of a TP group: one worker process per rank. Imports no torch."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Self

import msgspec

from pdnode.core.geometry import KvGeometry
from pdnode.engine.client import Worker, default_threads
from pdnode.engine.protocol import Init, Loading, Ready, Step, StepDone
from pdnode.errors import EngineDied


class WorkerGroup:
    """The workers of one TP group, which work as one. Made by `start`; belongs to its loop.

    `died` resolves, with the reason, once one process is gone for any reason, `close` included,
    and the others were ended as well: from then on none touches any page. Every call after that
    raises EngineDied.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = tuple(workers)
        self.died: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._end_together())

    @classmethod
    async def start(
        cls,
        init: Init,
        *,
        wake_fds: Sequence[int] = (),
        on_loading: Callable[[Loading], None] = lambda _: None,
        timeout_s: float = 300.0,
    ) -> Self:
        """Start `init.tp` processes and wait until all have loaded their parts of the model.

        As Worker.start; `init.rank` is ignored, and the threads of `init.threads` 0 are shared by
        `init.sharers`. `on_loading` hears of rank 0. EngineDied with the first failure of any rank.
        """
        if not init.threads:
            threads = max(1, (len(init.cpus) or default_threads()) // init.sharers)
            init = msgspec.structs.replace(init, threads=threads)
        # Named after nothing: the ranks meet over it, and it goes with the last of them.
        store_fd = os.memfd_create("pdnode-ranks", os.MFD_CLOEXEC) if init.tp > 1 else -1
        try:
            starts = [
                Worker.start(
                    msgspec.structs.replace(init, rank=rank),
                    wake_fds=[*wake_fds, store_fd] if init.tp > 1 else wake_fds,
                    on_loading=on_loading if rank == 0 else _unheard,
                    timeout_s=timeout_s,
                )
                for rank in range(init.tp)
            ]
            workers = await _all_or_none(starts)
        finally:
            if store_fd >= 0:
                os.close(store_fd)
        return cls(workers)

    @property
    def ready(self) -> Ready:
        """What rank 0 said; the other ranks differ in `load_s` at most."""
        return self.workers[0].ready

    @property
    def geometry(self) -> KvGeometry:
        ready = self.ready
        return KvGeometry(
            kind=ready.kind,
            layers=ready.layers,
            kv_heads=ready.kv_heads,
            head_dim=ready.head_dim,
            page_tokens=ready.page_tokens,
            dtype=ready.dtype,
            tp=ready.tp,
            pages=ready.pages,
        )

    @property
    def region_fds(self) -> tuple[int, ...]:
        """The KV region of every rank, each of `geometry.region_bytes`. They stay the workers'."""
        return tuple(worker.region_fd for worker in self.workers)

    @property
    def counter_fd(self) -> int:
        """Rank 0's counter page: it rises once the layer's KV is final on every rank."""
        return self.workers[0].counter_fd

    @property
    def base(self) -> int:
        return self.workers[0].base

    def layers_done(self) -> int:
        """What the layer counter shows: it moves with every layer of every pass."""
        return self.workers[0].layers_done()

    async def step(self, step: Step) -> StepDone:
        """Run one pass on all ranks; one at a time. EngineDied if one ends before it answers, once
        all have ended. A cancelled wait leaves the pass running: close the group then."""
        if self.died.done():
            raise self.died.result()
        answers = await asyncio.gather(
            *(worker.step(step) for worker in self.workers), return_exceptions=True
        )
        if any(isinstance(answer, EngineDied) for answer in answers):
            raise await self.died
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        assert isinstance(answers[0], StepDone)
        return answers[0]

    def kill(self, why: str) -> None:
        """End all processes without asking them; `died` follows and says why. Idempotent."""
        for worker in self.workers:
            worker.kill(why)

    async def close(self) -> None:
        """End all processes and close all descriptors. Idempotent."""
        await asyncio.gather(*(worker.close() for worker in self.workers))
        await self._watch

    async def _end_together(self) -> None:
        """When one process is gone the others wait for it for ever: end them, then say so."""
        ends = [worker.died for worker in self.workers]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        reason = next(end.result() for end in ends if end.done())
        for worker in self.workers:
            worker.kill()
        await asyncio.wait(ends)
        self.died.set_result(reason)


async def _all_or_none(starts: Sequence[Coroutine[None, None, Worker]]) -> list[Worker]:
    """The results of all; where one fails, the others are ended first and its error is raised."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(answer, Worker):
                await answer.close()
        raise


def _unheard(_: Loading) -> None:
    """Loading frames of ranks that nobody listens to."""
