"""What a configuration needs of the GPUs of this host, and of NICs that reach their memory."""

from collections.abc import Iterator

from pdnode.config import Config
from pdnode.errors import DeviceMissing, Problem
from pdnode.memory import cudriver
from pdnode.types import RegionKind

_WHERE = "engine.gpus"


def uses_gpus(config: Config) -> bool:
    return config.engine.device == "cuda" or config.kv.region in (
        RegionKind.STAGED,
        RegionKind.CUMEM,
    )


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
        dmabuf = cudriver.attribute(gpu.ordinal, "DMA_BUF_SUPPORTED")
        if config.kv.region == RegionKind.CUMEM and not dmabuf:
            text = f'the driver exports no dma-buf of GPU {gpu.pci}; use "auto" or "staged"'
            yield Problem("kv.region", text, device=True)
