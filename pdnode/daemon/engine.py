"""Starts the worker and builds what stands on its memory: pool, gate, scheduler, step loop."""

import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdnode.config import Config
from pdnode.confignics import PINNING_PROVIDERS
from pdnode.configrules import page_tokens
from pdnode.core.geometry import KvGeometry
from pdnode.core.pages import PagePool
from pdnode.core.schedule import Scheduler
from pdnode.daemon.steps import StepLoop
from pdnode.engine.client import Worker
from pdnode.engine.protocol import Init, Loading, Ready
from pdnode.messenger.gate import PageGate
from pdnode.obs.log import event

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model and the schedule over its KV pages."""

    worker: Worker
    geometry: KvGeometry
    gate: PageGate
    steps: StepLoop


def dtypes(config: Config) -> tuple[str, str]:
    """(weights and activations, KV): what is named, else float32 on CPU and KV as the weights."""
    weights = "float32" if config.engine.dtype == "auto" else config.engine.dtype
    return weights, weights if config.kv.dtype == "auto" else config.kv.dtype


async def start_engine(
    config: Config,
    wake_fds: Sequence[int],
    on_loading: Callable[[Loading], None],
    *,
    cpus: Sequence[int] = (),
) -> Engine:
    """The worker runs on `cpus`, if any are named. EngineDied if it cannot load the model."""
    engine = config.engine
    scheduler = Scheduler(
        page_tokens=page_tokens(config),
        chunk_tokens=engine.chunk_tokens,
        max_running=engine.max_running,
    )
    dtype, kv_dtype = dtypes(config)
    init = Init(
        model_path=str(config.model.path),
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_tokens=page_tokens(config),
        pages=0,
        pool_bytes=config.kv.pool_bytes,
        threads=engine.threads,
        max_batch_tokens=scheduler.max_pass_tokens,
        cpus=tuple(cpus),
        huge_pages=config.fabric.provider in PINNING_PROVIDERS,
    )
    worker = await Worker.start(
        init, wake_fds=wake_fds, on_loading=on_loading, timeout_s=engine.start_timeout_s
    )
    geometry = geometry_of(worker.ready)
    if init.huge_pages and worker.ready.memory_page_bytes <= mmap.PAGESIZE:
        event(
            _log, logging.WARNING, "kv.small_pages",
            "KV memory is not in huge pages: the NIC needs 512 times the entries; raise "
            "vm.nr_hugepages",
            bytes=geometry.region_bytes,
        )  # fmt: skip
    pool = PagePool(geometry.pages)
    quarantined = int(config.kv.max_quarantined_ratio * geometry.pages)
    return Engine(worker, geometry, PageGate(pool, quarantined), StepLoop(scheduler, worker))


def geometry_of(ready: Ready) -> KvGeometry:
    return KvGeometry(
        kind=ready.kind,
        layers=ready.layers,
        kv_heads=ready.kv_heads,
        head_dim=ready.head_dim,
        page_tokens=ready.page_tokens,
        dtype=ready.dtype,
        tp=1,
        pages=ready.pages,
    )
