"""What the daemon asks of the transfer core when it opens it."""

from pathlib import Path

import pytest

from pdnode.config import Config, FabricConfig, ModelConfig, NicConfig, NodeConfig, PeerConfig
from pdnode.daemon import transfer
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
