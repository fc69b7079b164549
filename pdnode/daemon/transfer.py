"""Opens the transfer core for this node: library, device groups, listeners, the workers' memory."""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdnode.config import Config, NicConfig
from pdnode.core.geometry import KvGeometry
from pdnode.core.wire import NicAddress
from pdnode.daemon.engine import Engine
from pdnode.daemon.kvregion import HOST_MEMORY, RegionChoice, choose_region, gpus_of
from pdnode.daemon.placement import NOT_PLACED, Placed, rank_homes
from pdnode.engine.group import WorkerGroup
from pdnode.errors import DeviceMissing
from pdnode.fabric._native import Fabric, FabricError
from pdnode.fabric.engine import FabricEngine
from pdnode.fabric.library import find_library
from pdnode.memory import cudriver
from pdnode.memory.cumem import CumemRegion
from pdnode.messenger.devices import Devices
from pdnode.messenger.groups import SourceRegion
from pdnode.obs.log import event
from pdnode.types import RegionKind, Role

_log = logging.getLogger(__name__)

WRITE_SILENCE_S = 60.0
"""A single write without completion for so long loses its connection, though others of that NIC
make progress; never before `[peer] stall_s` would."""


@dataclass(slots=True)
class Transfer:
    """The opened core. NICs are numbered in the order of their device groups, and within one in
    that of the configuration. `homes`: device group of each rank."""

    engine: FabricEngine
    fabric: Fabric
    devices: Devices
    homes: tuple[int, ...]
    nics: tuple[NicAddress, ...]  # endpoint: where peers connect, since `take_role` of a prefill
    line_bytes_per_s: Mapping[str, float]  # by NIC name, where the kernel knows the link speed
    region: RegionChoice = HOST_MEMORY
    # By NIC, where peers connect: once open it stays so, unused while the role is decode.
    _listening: dict[int, bytes] = field(default_factory=dict)
    _device_memory: list[CumemRegion] = field(default_factory=list)

    @property
    def wake_fds(self) -> list[int]:
        """Of the progress threads, by device group."""
        return [self.fabric.wake_fd(group) for group in range(len(self.devices.nics))]

    def rank_of(self, nic: int) -> int:
        """One whose memory this NIC is for."""
        return self.homes.index(self.devices.group_of(nic))

    def take_role(self, config: Config) -> None:
        """Addresses for the role of `config`; a prefill node listens on its NICs, and only that.
        Blocks for a moment. DeviceMissing in words if an address cannot be bound or given back.
        """
        listens = config.node.role is Role.PREFILL and self.fabric.limits["endpoint"] == "msg"
        addresses = []
        for number, nic in enumerate(_in_groups(config)):
            if listens and number not in self._listening:
                try:
                    self._listening[number] = _listen(self.fabric, number, nic, config)
                except FabricError as error:
                    raise DeviceMissing(f"[fabric] {error}") from error
            endpoint = self._listening[number] if listens else b""
            addresses.append(NicAddress(number, nic.name, endpoint, self._ranks(nic.group)))
        for number in () if listens else tuple(self._listening):
            try:
                self.fabric.unlisten(number)
            except FabricError as error:
                raise DeviceMissing(f"[fabric] {error}") from error
            del self._listening[number]
        self.nics = tuple(addresses)

    def _ranks(self, group: int) -> list[int]:
        """Of one of several device groups."""
        several = len(self.devices.nics) > 1
        return [rank for rank, home in enumerate(self.homes) if several and home == group]

    async def add_engine(self, engine: Engine, config: Config) -> list[tuple[SourceRegion, ...]]:
        """The memory of each TP group, in a thread: pinning may take long, and probes and the
        watchdog want their answers. Not left before that is done, though cancelled: it reads the
        workers' descriptors.
        """

        def add() -> list[tuple[SourceRegion, ...]]:
            return [
                self.add_memory(
                    one.worker,
                    engine.geometry,
                    gpus_of(config, number),
                    first_rank=number * config.engine.tp,
                )
                for number, one in enumerate(engine.groups)
            ]

        work = asyncio.ensure_future(asyncio.to_thread(add))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.gather(work, return_exceptions=True)
            raise

    def add_memory(
        self,
        worker: WorkerGroup,
        geometry: KvGeometry,
        gpus: Sequence[str] = (),
        *,
        first_rank: int,
    ) -> tuple[SourceRegion, ...]:
        """Map the region of each rank of a TP group, and the leader's counter page, into the core.

        One counter for all: it rises once the layer's KV is final on every rank. `gpus`: of the
        ranks, for regions in their memory. Ranks are numbered over all TP groups, from `first_rank`
        on. DeviceMissing if a NIC or a GPU refuses one.
        """
        counter = self.fabric.add_counter(worker.counter_fd)
        homes = self.homes[first_rank : first_rank + len(worker.region_fds)]
        try:
            if self.region.kind is RegionKind.CUMEM:
                numbers = [
                    self._add_device_region(home, fd, geometry, gpu)
                    for home, fd, gpu in zip(homes, worker.region_fds, gpus, strict=True)
                ]
            else:
                size, page = geometry.region_bytes, geometry.page_bytes
                numbers = [
                    self.fabric.add_region(home, fd, size, page)
                    for home, fd in zip(homes, worker.region_fds, strict=True)
                ]
        except FabricError as error:
            raise DeviceMissing(f"[fabric] {error}") from error
        return tuple(
            SourceRegion(number, counter, home) for number, home in zip(numbers, homes, strict=True)
        )

    def _add_device_region(self, group: int, fd: int, geometry: KvGeometry, gpu: str) -> int:
        """Mapped on the GPU that it is of; unmapped by `close`, after the NICs are."""
        ordinal = cudriver.find_gpu(gpu).ordinal
        mine = os.dup(fd)
        try:
            region = CumemRegion.adopt(mine, geometry.region_bytes, ordinal)
        except BaseException:
            os.close(mine)
            raise
        self._device_memory.append(region)
        dmabuf = region.dmabuf()
        try:
            return self.fabric.add_device_region(
                group, dmabuf, region.address, region.size_bytes, geometry.page_bytes, ordinal
            )
        finally:
            os.close(dmabuf)

    def close(self) -> None:
        """The core first, then what it had registered. Idempotent."""
        if cause := self.engine.close():
            event(
                _log, logging.WARNING, "fabric.not_closed", "the provider did not close all of it",
                cause=cause,
            )  # fmt: skip
        while self._device_memory:
            self._device_memory.pop().close()


def open_transfer(config: Config, placed: Placed = NOT_PLACED) -> Transfer:
    """Blocks for the self-test of every NIC. DeviceMissing in words if a part is not there,
    ConfigError as choose_region."""
    fabric_config = config.fabric
    nics = _in_groups(config)
    groups = [[n for n, nic in enumerate(nics) if nic.group == g] for g in range(len(placed.near))]
    try:
        library = find_library(fabric_config.library, fabric_config.provider)
        region = choose_region(config, library)
        fabric = Fabric(
            str(library),
            fabric_config.provider,
            fabric_config.poll,
            silence_s=max(WRITE_SILENCE_S, 2 * config.peer.stall_s),
            device_memory=region.kind is RegionKind.CUMEM,
        )
        for members, cpu in zip(groups, placed.progress, strict=True):
            fabric.add_group([(nics[n].name, nics[n].address) for n in members], cpu)
    except FabricError as error:
        raise DeviceMissing(f"[fabric] {error}") from error
    addresses = tuple(NicAddress(number, nic.name, b"") for number, nic in enumerate(nics))
    speeds = {nic.name: speed for nic in nics if (speed := _line_bytes_per_s(nic.name))}
    devices = Devices(tuple(frozenset(members) for members in groups), placed.near)
    homes = rank_homes(config, len(groups))
    return Transfer(FabricEngine(fabric), fabric, devices, homes, addresses, speeds, region)


def _in_groups(config: Config) -> list[NicConfig]:
    return sorted(config.fabric.nics, key=lambda nic: nic.group)


def _line_bytes_per_s(interface: str) -> float | None:
    """Link speed of a network interface; None for loopback, a link that is down, or a device that
    is not an interface."""
    try:
        megabits = int((Path("/sys/class/net") / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 125e3 if megabits > 0 else None


def _listen(fabric: Fabric, number: int, nic: NicConfig, config: Config) -> bytes:
    """`host:port` that peers connect to; an RDM endpoint is the session's."""
    bound = fabric.listen(number, nic.listen, config.fabric.port)
    host = f"[{nic.advertise}]" if ":" in nic.advertise else nic.advertise
    return f"{host}:{bound}".encode()
