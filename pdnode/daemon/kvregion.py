"""Where a node's KV pages are: the kind of their regions, and what the detour of one kind costs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdnode.config import Config
from pdnode.configgpu import gpu_names, out_of_reach
from pdnode.configrules import DEVICE_PROVIDERS, reading_problems
from pdnode.core.geometry import KvGeometry
from pdnode.errors import ConfigError
from pdnode.fabric._native import Fabric, FabricError
from pdnode.memory import cudriver
from pdnode.memory.cudriver import CudaError
from pdnode.obs.warnings import Condition
from pdnode.types import RegionKind, Role


@dataclass(frozen=True, slots=True)
class RegionChoice:
    """`reason`: why it is this one."""

    kind: RegionKind
    reason: str = "as configured"


HOST_MEMORY = RegionChoice(RegionKind.MEMFD)


def gpus_of(config: Config, group: int) -> tuple[str, ...]:
    """GPUs of the ranks of a TP group."""
    tp = config.engine.tp
    return gpu_names(config)[group * tp : (group + 1) * tp]


def choose_region(config: Config, library: Path | None) -> RegionChoice:
    """What `[kv] region` says; for "auto" what suits device, provider, driver and `library`
    (libfabric's; None: the node moves no pages). ConfigError where other keys do not go with it."""
    if config.kv.region != "auto":
        return RegionChoice(RegionKind(config.kv.region))
    if config.engine.device != "cuda":
        return RegionChoice(RegionKind.MEMFD, "the engine runs on the CPU")
    if library is None:
        return RegionChoice(RegionKind.CUMEM, "the pages stay on the GPU")
    if text := why_not_direct(config, library):
        return RegionChoice(RegionKind.STAGED, text)
    if problems := list(reading_problems(config)):
        raise ConfigError(problems)
    return RegionChoice(RegionKind.CUMEM, "the NICs reach the GPU's memory")


def why_not_direct(config: Config, library: Path) -> str:
    """Why the NICs cannot reach the memory of the GPUs; empty if they can."""
    provider = config.fabric.provider
    if provider not in DEVICE_PROVIDERS:
        return f"provider {provider} does not reach the memory of a GPU"
    try:
        for name in gpu_names(config):
            if text := out_of_reach(cudriver.find_gpu(name)):
                return text
        Fabric(str(library), provider, config.fabric.poll, device_memory=True).close()
    except (CudaError, FabricError) as error:
        return str(error)
    return ""


def staged_bytes(pages: int, geometry: KvGeometry) -> int:
    """Of so many pages, in all layers and on all ranks of a group."""
    return pages * geometry.layers * geometry.page_bytes * geometry.tp


def staged_conditions(
    choice: RegionChoice, role: Role, geometry: KvGeometry, pages: int
) -> Iterator[Condition]:
    """The warning of a node whose pages take the detour. `pages`: so far, both ways."""
    if choice.kind is RegionKind.STAGED and role is not Role.COLOCATED:
        per_token = staged_bytes(1, geometry) // geometry.page_tokens
        yield Condition(
            "W140",
            f"{choice.reason}: each token of a prompt between nodes costs one more copy of "
            f"{per_token} bytes here, {staged_bytes(pages, geometry)} bytes so far",
        )
