"""Two link machines joined in memory, one input at a time, so that either can be stopped."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.cooldown import Cooldowns
from pdnode.core.heartbeat import Counters
from pdnode.core.hello import wire_geometry
from pdnode.core.link import Link
from pdnode.core.link_state import LinkSettings, State
from pdnode.types import Role
from tests.support.link_nodes import GEOMETRY, hello

SETTINGS = LinkSettings(
    token=None, heartbeat_s=0.5, link_lost_s=3.0, step_timeout_s=5.0, stall_s=30.0
)
SESSION_TOKEN = bytes([9]) * wire.SESSION_TOKEN_BYTES
COUNTERS = Counters(0, False, 0, 0, 10)
Act = Callable[[Link], list[effects.Effect]]
OTHER = {Role.DECODE: Role.PREFILL, Role.PREFILL: Role.DECODE}


def scratch(*nics: int) -> wire.RegionDescriptor:
    return wire.RegionDescriptor(-1, [wire.RegionPiece(nic, 0, 4096, 0, 7 + nic) for nic in nics])


def memory(*nics: int, size: int = GEOMETRY.region_bytes, rank: int = 0) -> wire.RegionDescriptor:
    pieces = [wire.RegionPiece(nic, 0, size, 0, 70 + nic) for nic in nics]
    return wire.RegionDescriptor(rank, pieces)


def addresses(*nics: int) -> list[wire.NicAddress]:
    return [wire.NicAddress(nic, f"nic{nic}", f"host:{7700 + nic}".encode()) for nic in nics]


@dataclass(slots=True, eq=False)
class End:
    link: Link
    nics: tuple[int, ...]
    log: list[effects.Effect] = field(default_factory=list)
    probing: bool = False
    carried: dict[int, int] = field(default_factory=dict)  # rank: a NIC of another group

    def sent(self) -> list[wire.Frame]:
        return [effect.frame for effect in self.log if isinstance(effect, effects.SendFrame)]

    def lost(self) -> effects.SessionLost:
        """The one loss of this link."""
        found = [effect for effect in self.log if isinstance(effect, effects.SessionLost)]
        assert len(found) == 1, found
        return found[0]


class Duo:
    """`ends[role]`; `advance` runs inputs until a condition holds or nothing is left to do."""

    def __init__(
        self,
        *,
        settings: dict[Role, LinkSettings] | LinkSettings = SETTINGS,
        hellos: dict[Role, wire.Hello] | None = None,
        nics: dict[Role, tuple[int, ...]] | None = None,
        split: bool = False,
        ranks: int = 1,
    ) -> None:
        """`ranks` of the decode node, all in one device group. `split`: two ranks and two NICs, NIC
        n for rank n, in device groups of their own."""
        self.now = 100.0
        self.cooldowns = Cooldowns(30.0, 300.0)
        self.queue: deque[tuple[Role, Act]] = deque()
        self.split, self.ranks = split, ranks
        self.geometry = replace(GEOMETRY, tp=2) if split else GEOMETRY
        self.ends: dict[Role, End] = {}
        for number, role in enumerate(OTHER):
            own = settings[role] if isinstance(settings, dict) else settings
            link = Link(
                (hellos or {}).get(role) or hello(role, geometry=wire_geometry(self.geometry)),
                own,
                nonce=bytes([number]) * wire.NONCE_BYTES,
                session_token=SESSION_TOKEN,
                cooldowns=self.cooldowns if role is Role.DECODE else None,
            )
            self.ends[role] = End(link, (nics or {}).get(role, (0, 1) if split else (0,)))
        for role in OTHER:
            self._later(role, lambda link: link.opened(self.now), "owner")

    def advance(self, stop: Callable[[], bool] = lambda: False) -> None:
        while self.queue and not stop():
            role, act = self.queue.popleft()
            self.carry_out(role, act(self.ends[role].link))

    def to(self, role: Role, state: State) -> End:
        """Runs until the machine of `role` is in `state`."""
        end = self.ends[role]
        if state in (State.FENCING, State.CLOSED):
            self.to(role, State.PROBE if state is State.FENCING else State.AUTH)
            end.log += end.link.close("test", self.now)
        else:
            self.advance(lambda: end.link.state is state)
        assert end.link.state is state, (end.link.state, end.log)
        return end

    def carry_out(self, role: Role, found: list[effects.Effect]) -> None:
        end, other = self.ends[role], OTHER[role]
        end.log += found
        for effect in found:
            match effect:
                case effects.SendFrame():
                    data = wire.encode(effect.frame)
                    self._later(other, lambda link, data=data: link.receive(data, self.now), "link")
                case effects.Admit():
                    self._later(role, lambda link: link.admit(self.now), "owner")
                case effects.OpenSession():
                    regions = self._regions(role)
                    nics = self._addresses(role)
                    self._later(
                        role,
                        lambda link, nics=nics, regions=regions: link.session_opened(
                            nics, regions, self.now
                        ),
                    )
                case effects.Reopen():
                    nics, regions = self._addresses(role), self._regions(role)
                    self._later(
                        role, lambda link, n=nics, r=regions: link.session_opened(n, r, self.now)
                    )
                case effects.Carry(ranks=ranks, nics=on):
                    for rank in ranks:  # with one of them
                        end.carried[rank] = max(on)
                    regions = self._regions(role)
                    self._later(role, lambda link, r=regions: link.carried(r, self.now))
                case effects.FencePair(pair=pair):
                    self._later(role, lambda link, p=pair: link.pair_fenced(p, self.now))
                case effects.Connect(pair=pair):
                    self._later(role, lambda link, p=pair: self._connected(role, p))
                case effects.Probe():
                    end.probing = True
                    if all(one.probing for one in self.ends.values()):
                        self._all_probed()
                case _:
                    pass

    def _addresses(self, role: Role) -> list[wire.NicAddress]:
        found = addresses(*self.ends[role].nics)
        if not self.split:
            return found
        return [wire.NicAddress(one.nic, one.name, one.endpoint, [one.nic]) for one in found]

    def _regions(self, role: Role) -> list[wire.RegionDescriptor]:
        end = self.ends[role]
        if role is Role.PREFILL:
            return [scratch(*end.nics)]
        if not self.split:
            return [scratch(*end.nics), *(memory(*end.nics, rank=r) for r in range(self.ranks))]
        size = self.geometry.region_bytes
        nics = {rank: sorted({rank, end.carried.get(rank, rank)}) for rank in end.nics}
        return [scratch(*end.nics), *(memory(*nics[rank], size=size, rank=rank) for rank in nics)]

    def _connected(self, role: Role, pair: tuple[int, int]) -> list[effects.Effect]:
        turned = pair[1], pair[0]
        self._later(OTHER[role], lambda link: link.pair_connected(turned, self.now))
        return self.ends[role].link.pair_connected(pair, self.now)

    def _all_probed(self) -> None:
        decode, prefill = (self.ends[role].nics for role in (Role.DECODE, Role.PREFILL))
        for turn in range(max(len(decode), len(prefill))):
            pair = decode[turn % len(decode)], prefill[turn % len(prefill)]
            turned = pair[1], pair[0]
            self._later(Role.DECODE, lambda link, p=pair: link.pair_probed(p, self.now))
            self._later(Role.PREFILL, lambda link, p=turned: link.pair_probed(p, self.now))

    def _later(self, role: Role, act: Act, source: str = "fabric") -> None:
        """`source`: owner, link or fabric. Here all wait in one queue."""
        self.queue.append((role, act))


def up(**changes: object) -> Duo:
    """Both ends up, nothing left to do."""
    duo = Duo(**changes)  # type: ignore[arg-type]
    duo.advance()
    assert {end.link.state for end in duo.ends.values()} == {State.UP}
    return duo
