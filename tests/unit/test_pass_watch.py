"""A pass that stands still ends its engine; one that is slow, or none at all, does not."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from pdnode.daemon.passwatch import LOOK_S, PassWatch


@dataclass
class Group:
    """A TP group: its worker and its step loop in one."""

    layers: int = 0
    busy: bool = True
    died: Future[None] = field(default_factory=Future)
    killed: list[str] = field(default_factory=list)

    @property
    def worker(self) -> "Group":
        return self

    @property
    def steps(self) -> "Group":
        return self

    @property
    def groups(self) -> "tuple[Group, ...]":
        return (Group(busy=False), self)

    def layers_done(self) -> int:
        assert not self.died.done(), "its descriptors are closed"
        return self.layers

    def kill(self, why: str) -> None:
        self.killed.append(why)
        self.died.set_result(None)


def watched(group: Group) -> PassWatch:
    watch = PassWatch(cast(Any, group), 3 * LOOK_S)
    watch.look()
    return watch


def test_a_pass_that_stands_still() -> None:
    group = Group()
    watch = watched(group)
    for _ in range(2):
        watch.look()
    assert not group.killed
    for _ in range(4):
        watch.look()
    assert group.killed == ["no layer of a pass was done for 3 s"]


def test_slow_passes_and_idle_engines() -> None:
    group = Group()
    watch = watched(group)
    for number in range(12):
        group.layers += number % 3 == 2
        watch.look()
    group.busy = False
    for _ in range(6):
        watch.look()
    group.busy = True
    for _ in range(2):
        watch.look()
    assert not group.killed
