"""Two links under random order, loss, death and bad frames: what holds in every run.

Order is free between the two directions of the link, the two fabrics and the clocks; within one of
them it is kept. A run that fails names its seed.
"""

import random
from collections import defaultdict, deque

import pytest

from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.link import Link
from pdnode.core.link_state import State
from pdnode.types import Role
from tests.support.link_duo import COUNTERS, OTHER, Act, Duo
from tests.support.link_nodes import hello

NICS = {Role.DECODE: (0, 1), Role.PREFILL: (0, 1, 2)}
PAIRS = ((0, 0), (1, 1), (0, 2))  # (decode NIC, prefill NIC)


class Storm(Duo):
    """A duo whose inputs wait in one queue for each source; the seed says which goes next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sources: dict[tuple[Role, str], deque[Act]] = defaultdict(deque)
        self.cut = False
        super().__init__(nics=NICS)

    def carry_out(self, role: Role, found: list[effects.Effect]) -> None:
        super().carry_out(role, found)
        other = OTHER[role]
        for effect in found:
            if isinstance(effect, effects.Fence):
                self._later(role, lambda link: link.session_fenced(self.now))
                for pair in PAIRS:
                    theirs = pair if other is Role.DECODE else (pair[1], pair[0])
                    self._later(other, lambda link, p=theirs: link.pair_lost(p, "died", self.now))
            if isinstance(effect, effects.CloseTransport):
                self._later(other, lambda link: link.transport_closed("closed", self.now), "link")

    def step(self) -> bool:
        """One input; what the owners have to do comes first."""
        ready = [key for key, waiting in self.sources.items() if waiting]
        if not ready:
            return False
        owners = [key for key in ready if key[1] == "owner"]
        role, source = owners[0] if owners else self.random.choice(ready)
        act = self.sources[role, source].popleft()
        if source == "link" and self.cut:
            self.run(role, lambda link: link.transport_closed("reset", self.now))
        else:
            self.run(role, act)
        return True

    def _later(self, role: Role, act: Act, source: str = "fabric") -> None:
        self.sources[role, source].append(act)

    def run(self, role: Role, act: Act) -> None:
        self.carry_out(role, act(self.ends[role].link))

    def tick(self, role: Role) -> None:
        self.run(role, lambda link: link.tick(self.now, COUNTERS))

    def disturb(self) -> None:
        """One fault, somewhere; owners have answered before it (they do so at once)."""
        role = self.random.choice(list(OTHER))
        while any(waiting and key[1] == "owner" for key, waiting in self.sources.items()):
            self.step()
        match self.random.randrange(8):
            case 0:
                self.cut = True
                self.run(role, lambda link: link.transport_closed("reset", self.now))
            case 1:
                self.run(role, lambda link: link.close("enough", self.now))
            case 2:
                self.run(role, lambda link: link.receive(self.random.randbytes(9), self.now))
            case 3:
                self.now += self.random.choice([0.1, 1.0, 4.0])
                self.tick(role)
            case 4:
                pair = self.random.choice([(0, 0), (1, 1), (2, 0), (0, 2)])
                self.run(role, lambda link: link.pair_lost(pair, "died", self.now))
            case 5:
                self.run(role, lambda link: link.fabric_failed("no memory", self.now))
            case 6:
                self.run(role, lambda link: link.session_fenced(self.now))
            case _:
                self.run(role, lambda link: link.drain(self.random.random() < 0.5))


def check(log: list[effects.Effect], link: Link) -> None:
    """The order of effects that the messenger relies on."""
    names = [type(effect).__name__ for effect in log]
    for once in ("OpenSession", "SessionUp", "SessionLost", "Fence", "CloseTransport", "Finished"):
        assert names.count(once) <= 1, once
    if "SessionLost" in names:
        lost = names.index("SessionLost")
        assert ("Fence" in names) == ("OpenSession" in names)
        if "Fence" in names:
            assert names.index("Fence") == lost - 1
        assert not {"Deliver", "SessionUp", "PairLost", "Connect", "Probe"} & set(names[lost:])
    if "Finished" in names:
        assert names[-1] == "Finished"
        assert link.state is State.CLOSED
    told = [place for place, name in enumerate(names) if name in ("Deliver", "PairLost")]
    assert not told or names.index("SessionUp") < told[0]


@pytest.mark.parametrize("block", range(8))
def test_a_quiet_storm_comes_up(block: int) -> None:
    """Any order at all, without faults, ends with both sides up."""
    for seed in range(100 * block, 100 * block + 50):
        storm = Storm(seed)
        while storm.step():
            pass
        for end in storm.ends.values():
            assert end.link.state is State.UP, (seed, end.log)
            check(end.log, end.link)


@pytest.mark.parametrize("block", range(8))
def test_a_storm_ends_with_both_sides_fenced_or_up(block: int) -> None:
    outcomes = set()
    for seed in range(100 * block, 100 * block + 100):
        storm = Storm(seed)
        faults = storm.random.randrange(1, 4)
        for _ in range(storm.random.randrange(60)):
            storm.step()
        for _ in range(faults):
            storm.disturb()
            storm.step()
        while storm.step():
            pass
        # Silence: whoever still waits for the other gives up.
        for _ in range(2):
            storm.now += 10
            for role in OTHER:
                storm.tick(role)
            while storm.step():
                pass
        for role, end in storm.ends.items():
            assert end.link.state is State.CLOSED, (seed, role, end.link.state)
            check(end.log, end.link)
            outcomes.add((role, end.lost().refused, "SessionUp" in str(end.log)))
    assert len(outcomes) > 2  # the seeds reach both sides, before and after up


def test_a_frame_of_the_messenger_arrives_in_order() -> None:
    storm = Storm(7)
    while storm.step():
        pass
    decode, prefill = (storm.ends[role] for role in OTHER)
    boot = hello(Role.DECODE).boot
    sent = [wire.Cancel(f"{boot}:{number}") for number in range(5)]
    for frame in sent:
        prefill.log += prefill.link.receive(wire.encode(frame), storm.now)
    assert [one.frame for one in prefill.log if isinstance(one, effects.Deliver)] == sent
    assert decode.link.state is State.UP
