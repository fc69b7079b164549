"""The NICs of a configuration that names none: what topology/choose.py picks on this host."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

from pdnode.config import Config, NicConfig
from pdnode.configgpu import gpu_names, uses_gpus
from pdnode.errors import DeviceMissing
from pdnode.fabric.library import find_library
from pdnode.memory import cudriver
from pdnode.topology.choose import Choice, FabricDevice, choose, default_route
from pdnode.topology.detect import detect
from pdnode.topology.ncclxml import override, read_topology_file
from pdnode.topology.sysfs import Sysfs
from pdnode.topology.usable import Policy
from pdnode.types import Role

AddressOf = Callable[[str], str | None]
"""A NIC's IP address; None without one."""


def chooses(config: Config) -> bool:
    """Whether the host decides: no NIC is named, and the role needs some."""
    return not config.fabric.nics and config.node.role is not Role.COLOCATED


def choose_nics(config: Config, address_of: AddressOf) -> Choice:
    """Reads /sys, asks the driver for the GPUs, and for RDMA loads libfabric. ConfigError if the
    topology file is no good."""
    host, wanted = detect(), config.topology
    if wanted.file:
        host = override(host, read_topology_file(Path(wanted.file)))
    return choose(
        host,
        Policy(wanted.allow, wanted.deny, config.fabric.provider),
        _devices(config),
        gpus=_gpus(config),
        address_of=address_of,
        default_route=default_route(Sysfs()),
    )


def with_chosen_nics(config: Config, address_of: AddressOf) -> Config:
    """`config` itself if it names NICs, else with those chosen; DeviceMissing, with the reason
    against each, where none can be used."""
    if not chooses(config):
        return config
    choice = choose_nics(config, address_of)
    if not choice.chosen:
        against = "; ".join(f"{one.nic.name}: {one.reason}" for one in choice.refused)
        raise DeviceMissing(
            f"fabric.nics: none is named and none of this host can be used for "
            f'"{config.fabric.provider}": {against or "it shows no NIC"}'
        )
    nics = tuple(NicConfig(one.nic.name, "", "", "", one.group) for one in choice.chosen)
    fabric = dataclasses.replace(config.fabric, nics=nics, homes=choice.homes)
    return dataclasses.replace(config, fabric=fabric)


def _gpus(config: Config) -> tuple[str, ...]:
    """PCI addresses of the ranks' GPUs; none where there is no way to them, which `gpu_problems`
    says itself."""
    if uses_gpus(config):
        with contextlib.suppress(DeviceMissing):
            return tuple(cudriver.find_gpu(name).pci for name in gpu_names(config))
    return ()


def _devices(config: Config) -> list[FabricDevice]:
    """libfabric's own view; nothing where it cannot be asked, which `check-config` says itself."""
    if config.fabric.provider.startswith("tcp"):
        return []
    from pdnode.fabric._native import Fabric, FabricError

    with contextlib.suppress(DeviceMissing, FabricError):
        library = find_library(config.fabric.library, config.fabric.provider)
        fabric = Fabric(str(library), config.fabric.provider, config.fabric.poll)
        try:
            return [
                FabricDevice(name, pci, state, bits / 1e9)
                for name, pci, state, bits in fabric.devices()
            ]
        finally:
            fabric.close()
    return []
