"""What is shown of nodes whose peers have another width, and of nodes with several groups."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdnode.config import Config, ModelConfig, NodeConfig
from pdnode.core.geometry import KvGeometry
from pdnode.core.pages import PagePool
from pdnode.core.schedule import Scheduler, Sequence
from pdnode.daemon.engine import Engine, Group
from pdnode.daemon.figures import Figures, mean_unit_bytes
from pdnode.daemon.snapshots import Snapshots
from pdnode.daemon.steps import StepLoop
from pdnode.messenger.gate import PageGate
from pdnode.obs import snapshot as form
from pdnode.types import BootId, Role, Run, SequenceId, SessionId, WhenNoPrefill


def geometry(*, heads: int, tp: int, pages: int = 8) -> KvGeometry:
    return KvGeometry("gqa", 2, heads, 8, 16, "float32", tp, pages)


HEAD = geometry(heads=1, tp=1).head_bytes


@pytest.mark.parametrize(
    ("source", "destination", "heads"),
    [
        (geometry(heads=4, tp=2), geometry(heads=4, tp=2), 2.0),
        (geometry(heads=4, tp=2), geometry(heads=4, tp=1), 2.0),  # not the 4 of a page here
        (geometry(heads=4, tp=1), geometry(heads=4, tp=4), 1.0),
        (geometry(heads=6, tp=2), geometry(heads=6, tp=3), 1.5),  # 2, 1, 1 and 2
        (geometry(heads=2, tp=4), geometry(heads=2, tp=4), 1.0),
    ],
)
def test_a_unit_is_what_a_route_carries(
    source: KvGeometry, destination: KvGeometry, heads: float
) -> None:
    assert mean_unit_bytes(source, destination) == heads * HEAD


def figures(engine: Engine) -> Figures:
    config = Config(
        node=NodeConfig("d", Role.DECODE, WhenNoPrefill.LOCAL), model=ModelConfig(Path("m"), "m")
    )
    nothing = cast(Any, None)
    return Figures(config, nothing, nothing, boot=BootId("b"), engine=engine)


def engine(here: KvGeometry, groups: int) -> Engine:
    found = []
    for _ in range(groups):
        scheduler = Scheduler(page_tokens=16, chunk_tokens=16, max_running=4)
        gate = PageGate(PagePool(here.pages), max_quarantined=4)
        found.append(Group(cast(Any, None), gate, StepLoop(scheduler, cast(Any, None))))
    return Engine(here, tuple(found))


def test_received_bytes_are_those_of_the_pages_whatever_the_width_of_the_peer() -> None:
    """A page of two layers from two ranks: four units, each half of a page here."""
    parts = figures(engine(geometry(heads=4, tp=1), 1))
    there = SimpleNamespace(session=SessionId(7), node="p", geometry=geometry(heads=4, tp=2))
    row = {"session": 7, "local_nic": 0, "received_units": 4, "done_bytes": 0}
    nic = {"name": "eth0", "done_bytes": 0, "received_units": 4, "failed_writes": 0}
    fabric = SimpleNamespace(peer_statistics=lambda: [row], nic_statistics=lambda: [nic])
    nics = [SimpleNamespace(nic=0, name="eth0")]
    parts.transfer = cast(Any, SimpleNamespace(fabric=fabric, nics=nics, line_bytes_per_s={}))
    parts.peers = cast(Any, SimpleNamespace(sessions=lambda: [there]))
    whole = 2 * 4 * HEAD
    assert parts.moved_by_peer() == {("eth0", "p"): (whole, 0)}
    assert [one.bytes_received for one in parts.nics()] == [whole]
    parts.peers = cast(Any, SimpleNamespace(sessions=list))
    assert [one.bytes_received for one in parts.nics()] == [whole], "it does not fall back"


def test_groups_are_shown_where_there_are_several() -> None:
    def shown(parts: Figures) -> tuple[form.Group, ...]:
        metrics = SimpleNamespace(clock=lambda: 0.0)
        return Snapshots(
            parts, cast(Any, None), cast(Any, metrics), cast(Any, None), actions=list
        )._groups()

    assert shown(figures(engine(geometry(heads=1, tp=1), 1))) == ()
    two = engine(geometry(heads=1, tp=1), 2)
    pages = two.groups[1].gate.pool.reserve(2)
    assert pages == (Run(0, 2),)
    two.groups[1].steps.scheduler.add(
        Sequence(sequence=SequenceId(1), tokens=[1] * 20, prompt_tokens=20, pages=pages)
    )
    assert shown(figures(two)) == (
        form.Group(pages=8, pages_free=8, waiting=0, running=0),
        form.Group(pages=8, pages_free=6, waiting=1, running=0),
    )
