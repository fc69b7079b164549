"""Starts the workers and builds what stands on their memory: pool, gate, scheduler, step loop."""

import asyncio
import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pdnode.config import Config
from pdnode.confignics import PINNING_PROVIDERS
from pdnode.configrules import dtypes, page_tokens
from pdnode.core.geometry import KvGeometry
from pdnode.core.pages import PageCounts, PagePool
from pdnode.core.schedule import Scheduler
from pdnode.daemon.kvregion import HOST_MEMORY, RegionChoice, gpus_of
from pdnode.daemon.steps import StepFigures, StepLoop
from pdnode.daemon.verification import choose_canaries
from pdnode.engine.group import WorkerGroup
from pdnode.engine.protocol import Init, Loading
from pdnode.messenger.gate import PageGate
from pdnode.obs.log import event
from pdnode.types import RegionKind

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Group:
    """One TP group: the workers of its ranks, its KV pages, and the schedule over them."""

    worker: WorkerGroup
    gate: PageGate
    steps: StepLoop


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model, in one TP group or in several alike (data parallelism)."""

    geometry: KvGeometry  # of each group
    groups: tuple[Group, ...]
    region: RegionChoice = HOST_MEMORY

    @property
    def page_counts(self) -> PageCounts:
        """Of all groups together."""
        counts = [group.gate.pool.counts for group in self.groups]
        return PageCounts(*map(sum, zip(*counts, strict=True)))

    @property
    def max_quarantined(self) -> int:
        return sum(group.gate.max_quarantined for group in self.groups)

    @property
    def figures(self) -> StepFigures:
        """Of all groups together."""
        found = [group.steps.figures for group in self.groups]
        return StepFigures(
            steps=sum(one.steps for one in found),
            prefill_tokens=sum(one.prefill_tokens for one in found),
            decode_tokens=sum(one.decode_tokens for one in found),
            compute_s=sum(one.compute_s for one in found),
            fetched_pages=sum(one.fetched_pages for one in found),
            stored_pages=sum(one.stored_pages for one in found),
        )

    @property
    def busy(self) -> bool:
        """A pass runs, in some group."""
        return any(group.steps.busy for group in self.groups)

    def waiting_tokens(self) -> int:
        return sum(group.steps.waiting_tokens() for group in self.groups)

    async def close(self) -> None:
        await asyncio.gather(*(group.worker.close() for group in self.groups))


async def start_engine(
    config: Config,
    wake_fds: Sequence[int],
    on_loading: Callable[[Loading], None],
    *,
    cpus: Sequence[int] = (),
    region: RegionChoice = HOST_MEMORY,
) -> Engine:
    """The workers run on `cpus`, if any are named. EngineDied if one cannot load the model.

    The first group says how many pages it has; the others have as many.
    """
    event(
        _log, logging.INFO, "kv.region", "KV pages are in this kind of memory",
        kind=region.kind, reason=region.reason,
    )  # fmt: skip
    event(
        _log, logging.INFO, "engine.device", "the engine runs on this device",
        device=config.engine.device, reason=config.engine.device_reason,
    )  # fmt: skip
    workers: list[WorkerGroup] = []
    try:
        for number in range(config.engine.dp):
            pages = workers[0].ready.pages if workers else 0
            init = msgspec.structs.replace(
                _init(config, cpus, pages),
                region_kind=region.kind,
                gpus=() if region.kind is RegionKind.MEMFD else gpus_of(config, number),
            )
            workers.append(
                await WorkerGroup.start(
                    init,
                    wake_fds=wake_fds,
                    on_loading=on_loading,
                    timeout_s=config.engine.start_timeout_s,
                )
            )
    except BaseException:
        await asyncio.gather(*(worker.close() for worker in workers))
        raise
    geometry = workers[0].geometry
    huge = init.huge_pages and region.kind is not RegionKind.CUMEM
    if huge and workers[0].ready.memory_page_bytes <= mmap.PAGESIZE:
        event(
            _log, logging.WARNING, "kv.small_pages",
            "KV memory is not in huge pages: the NIC needs 512 times the entries; raise "
            "vm.nr_hugepages",
            bytes=geometry.region_bytes,
        )  # fmt: skip
    on_gpu = region.kind is not RegionKind.MEMFD
    groups = tuple(_group(config, worker, geometry, names_pages=on_gpu) for worker in workers)
    return Engine(geometry, groups, region)


def _init(config: Config, cpus: Sequence[int], pages: int) -> Init:
    dtype, kv_dtype = dtypes(config)
    tp = config.engine.tp
    return Init(
        model_path=str(config.model.path),
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_tokens=page_tokens(config),
        pages=pages,
        pool_bytes=config.kv.pool_bytes // tp,
        threads=config.engine.threads,
        max_batch_tokens=_scheduler(config).max_pass_tokens,
        cpus=tuple(cpus),
        tp=tp,
        sharers=tp * config.engine.dp,
        huge_pages=config.fabric.provider in PINNING_PROVIDERS,
        device=config.engine.device,
        graph_rows=config.engine.max_running if config.engine.cuda_graphs else 0,
        cache_dir=str(config.node.cache_dir / "kernels"),
    )


def _scheduler(config: Config) -> Scheduler:
    return Scheduler(
        page_tokens=page_tokens(config),
        chunk_tokens=config.engine.chunk_tokens,
        max_running=config.engine.max_running,
    )


def _group(
    config: Config, worker: WorkerGroup, geometry: KvGeometry, *, names_pages: bool
) -> Group:
    quarantined = int(config.kv.max_quarantined_ratio * geometry.pages)
    canaries = choose_canaries(geometry.pages, config.kv.canary_pages)
    gate = PageGate(PagePool(geometry.pages, canaries), quarantined)
    return Group(worker, gate, StepLoop(_scheduler(config), worker, names_pages))
