"""What the daemon asks of the transfer core when it opens it."""

import asyncio
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from pdnode.config import (
    Config,
    EngineConfig,
    FabricConfig,
    ModelConfig,
    NicConfig,
    NodeConfig,
    PeerConfig,
)
from pdnode.daemon import transfer
from pdnode.daemon.placement import choose_places
from pdnode.messenger.devices import Devices
from pdnode.types import Role, WhenNoPrefill


@pytest.mark.parametrize(("stall_s", "silence_s"), [(3.0, 60.0), (30.0, 60.0), (300.0, 600.0)])
def test_a_write_may_always_take_longer_than_a_nic_may_stall(
    monkeypatch: pytest.MonkeyPatch, stall_s: float, silence_s: float
) -> None:
    asked: list[float] = []

    class Recorder:
        event_fd = -1

        def __init__(
            self, library: str, provider: str, poll: str, *, silence_s: float, device_memory: bool
        ) -> None:
            asked.append(silence_s)

        def add_group(self, nics: list[tuple[str, str]], cpu: int) -> int:
            return 0

    monkeypatch.setattr(transfer, "Fabric", Recorder)
    monkeypatch.setattr(transfer, "find_library", lambda library, provider: Path("/fabric.so"))
    transfer.open_transfer(
        Config(
            node=NodeConfig("d", Role.DECODE, WhenNoPrefill.LOCAL),
            model=ModelConfig(Path("m"), "m"),
            fabric=FabricConfig(nics=(NicConfig("lo", "127.0.0.1", "", ""),)),
            peer=PeerConfig(stall_s=stall_s),
        )
    )
    assert asked == [silence_s]


def test_the_chosen_group_of_each_rank_is_where_its_memory_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """(0, 1, 1) is not what dealing three ranks to two groups in order gives."""
    groups: list[list[str]] = []
    regions: list[tuple[int, int]] = []

    class Recorder:
        event_fd = -1
        limits: ClassVar = {"endpoint": "msg"}

        def __init__(self, *_: object, **__: object) -> None: ...

        def add_group(self, nics: list[tuple[str, str]], cpu: int) -> int:
            groups.append([name for name, _ in nics])
            return len(groups) - 1

        def add_counter(self, fd: int) -> int:
            return 0

        def add_region(self, group: int, fd: int, size: int, page: int) -> int:
            regions.append((group, fd))
            return fd

    monkeypatch.setattr(transfer, "Fabric", Recorder)
    monkeypatch.setattr(transfer, "find_library", lambda library, provider: Path("/fabric.so"))
    nics = (NicConfig("b", "", "", "", 1), NicConfig("a", "", "", "", 0))
    config = Config(
        node=NodeConfig("d", Role.DECODE, WhenNoPrefill.LOCAL),
        model=ModelConfig(Path("m"), "m"),
        engine=EngineConfig(tp=3),
        fabric=FabricConfig(nics=nics, homes=(0, 1, 1)),
    )
    with caplog.at_level(logging.INFO):
        placed = choose_places(config)
    (record,) = [one for one in caplog.records if "device groups" in one.getMessage()]
    assert "0: a for rank 0; 1: b for rank 1, 2" in str(record.__dict__)
    opened = transfer.open_transfer(config, placed)
    assert groups == [["a"], ["b"]]
    worker = SimpleNamespace(counter_fd=9, region_fds=[10, 11, 12])
    geometry = SimpleNamespace(region_bytes=64, page_bytes=64)
    sources = opened.add_memory(worker, geometry, first_rank=0)  # type: ignore[arg-type]
    assert regions == [(0, 10), (1, 11), (1, 12)]
    assert [source.group for source in sources] == [0, 1, 1]
    opened.take_role(config)
    assert [(nic.name, nic.ranks) for nic in opened.nics] == [("a", [0]), ("b", [1, 2])]


class SlowFabric:
    """A provider that pins until somebody else lets it."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()
        self.added: list[int] = []

    def add_counter(self, fd: int) -> int:
        return 0

    def add_region(self, group: int, fd: int, size: int, page: int) -> int:
        self.asked.set()
        assert self.released.wait(20), "the loop stands still while memory is registered"
        self.added.append(fd)
        return fd


def adding(fabric: SlowFabric) -> "asyncio.Task[list[tuple[transfer.SourceRegion, ...]]]":
    """Of an engine of two TP groups with one rank each."""
    opened = transfer.Transfer(None, fabric, Devices((frozenset({0}),), ()), (0, 0), (), {})  # type: ignore[arg-type]
    workers = [SimpleNamespace(counter_fd=9, region_fds=[fd]) for fd in (10, 11)]
    engine = SimpleNamespace(
        geometry=SimpleNamespace(region_bytes=64, page_bytes=64),
        groups=[SimpleNamespace(worker=worker) for worker in workers],
    )
    config = Config(
        node=NodeConfig("d", Role.DECODE, WhenNoPrefill.LOCAL),
        model=ModelConfig(Path("m"), "m"),
        engine=EngineConfig(dp=2),
    )
    return asyncio.create_task(opened.add_engine(engine, config))  # type: ignore[arg-type]


async def test_the_loop_goes_on_while_memory_is_registered() -> None:
    fabric = SlowFabric()
    work = adding(fabric)
    await asyncio.to_thread(fabric.asked.wait, 20)
    fabric.released.set()
    assert [[one.region for one in group] for group in await work] == [[10], [11]]


async def test_what_is_being_registered_is_not_left_when_the_node_stops() -> None:
    fabric = SlowFabric()
    work = adding(fabric)
    await asyncio.to_thread(fabric.asked.wait, 20)
    work.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not work.done()
    fabric.released.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert fabric.added == [10, 11]


def test_what_the_provider_does_not_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = SimpleNamespace(close=lambda: "fi_close: busy [verbs]")
    opened = transfer.Transfer(engine, None, Devices((), ()), (), (), {})  # type: ignore[arg-type]
    opened.close()
    (record,) = caplog.records
    assert (record.levelname, record.__dict__["code"]) == ("WARNING", "fabric.not_closed")
    engine.close = lambda: ""
    opened.close()
    assert len(caplog.records) == 1
