"""What a configuration needs of the GPUs of this host, and of NICs that reach their memory."""

from collections.abc import Iterator

from pdnode.config import Config
from pdnode.configrules import GPU_REGIONS
from pdnode.errors import DeviceMissing, Problem
from pdnode.memory import cudriver
from pdnode.types import RegionKind

_WHERE = "engine.gpus"


def uses_gpus(config: Config) -> bool:
    return config.engine.device == "cuda" or config.kv.region in GPU_REGIONS


def gpu_names(config: Config) -> tuple[str, ...]:
    """One for each worker, group by group: those of `[engine] gpus`, else by number."""
    workers = config.engine.tp * config.engine.dp
    return config.engine.gpus or tuple(str(number) for number in range(workers))


def gpu_problems(config: Config) -> Iterator[Problem]:
    """GPUs that this process does not see, and those whose driver exports no dma-buf."""
    if not uses_gpus(config):
        return
    try:
        count = cudriver.gpu_count()
    except DeviceMissing as error:
        yield Problem(_WHERE, str(error), device=True)
        return
    names = gpu_names(config)
    if not config.engine.gpus and len(names) > count:
        text = f"{len(names)} workers (tp × dp) need a GPU each, {count} are visible here"
        yield Problem(_WHERE, text, device=True)
        return
    for name in names:
        try:
            gpu = cudriver.find_gpu(name)
        except DeviceMissing as error:
            yield Problem(_WHERE, str(error), device=True)
            continue
        if config.kv.region == RegionKind.CUMEM and (text := out_of_reach(gpu)):
            yield Problem("kv.region", f'{text}; use "auto" or "staged"', device=True)


def out_of_reach(gpu: cudriver.Gpu) -> str:
    """Why NICs cannot use the memory of this GPU; empty if they can."""
    if not cudriver.attribute(gpu.ordinal, "DMA_BUF_SUPPORTED"):
        return f"the driver exports no dma-buf of GPU {gpu.pci}"
    flushed = cudriver.can_flush_nic_writes(gpu.ordinal)
    if not flushed and not cudriver.orders_nic_writes(gpu.ordinal):
        return f"GPU {gpu.pci} neither orders nor flushes what NICs write"
    return ""
