"""One peer link at work: joins the pure machine (core/link.py) to a socket, a timer and the fabric.

Everything runs on the event loop. Effects are carried out in order, one after the other, even when
carrying one out causes further input: a listener that closes the link from inside `session_frame`
is heard when the effects before that are done.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.heartbeat import Counters
from pdnode.core.link import Link
from pdnode.core.link_state import OVER, State
from pdnode.core.nics import SCRATCH_RANK, Pair
from pdnode.fabric._native import FabricError
from pdnode.messenger.devices import ONE_GROUP, Devices
from pdnode.messenger.session import PeerSession, SessionListener
from pdnode.obs.log import event
from pdnode.types import BootId, NodeId, Role, SessionId

_log = logging.getLogger(__name__)
_NO_REGION = -1  # how the fabric numbers the scratch region

Piece = tuple[int, int, int, int, int]
"""(NIC, offset, length, base, key)"""


class Transport(Protocol):
    """A WebSocket (api/peer.py). Only `receive` and `wait_closed` wait."""

    cause: str

    @property
    def address(self) -> str: ...
    @property
    def names(self) -> frozenset[str]:
        """In the peer's certificate; none without TLS."""

    def send(self, data: bytes) -> None: ...
    async def receive(self) -> bytes | None: ...
    def proved(self) -> None: ...
    def close(self, text: str) -> None: ...
    async def wait_closed(self) -> None: ...


class SessionFabric(Protocol):
    """What a link needs of fabric.Fabric. All calls only queue; answers come as events."""

    @property
    def limits(self) -> dict[str, int | str | bool]: ...
    def open_session(
        self, session: int, nics: Sequence[int], writable: Sequence[int], token: bytes
    ) -> None: ...
    def descriptors(self, session: int) -> list[tuple[int, list[Piece]]]: ...
    def carry(self, session: int, region: int, group: int) -> None: ...
    def endpoint_name(self, session: int, nic: int) -> bytes: ...
    def connect(self, session: int, pair: Pair, endpoint: bytes, deadline_s: float) -> None: ...
    def set_remote(self, session: int, regions: Sequence[tuple[int, Sequence[Piece]]]) -> None: ...
    def probe(self, session: int, answer: bool = False) -> None: ...
    def fence(self, session: int, pair: Pair | None = None) -> None: ...


class FabricEvent(Protocol):
    """fabric.Event, as far as sessions are concerned."""

    @property
    def kind(self) -> str: ...
    @property
    def session(self) -> int: ...
    @property
    def pair(self) -> Pair: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """What this node tells its peers. A new worker means a new boot id, regions and hello."""

    hello: wire.Hello
    nics: tuple[wire.NicAddress, ...]  # endpoint: where peers connect (prefill, FI_EP_MSG)
    regions: Mapping[int, int]  # rank → fabric region that a peer may write to; decode only
    devices: Devices = ONE_GROUP
    homes: Mapping[int, int] = field(default_factory=dict)  # rank → its device group; default 0


class LinkOwner(Protocol):
    """Called by its links, in the order of the methods. The peer manager."""

    def link_admit(self, link: "PeerLink", node: str) -> list[str]:
        """Reasons of this node against the peer; none admits it."""

    def link_up(self, link: "PeerLink") -> None: ...
    def link_lost(self, link: "PeerLink", lost: effects.SessionLost) -> None: ...
    def link_finished(self, link: "PeerLink") -> None: ...


class PeerLink:
    """Lives from the open socket to the confirmed fence. `peer` is set from session_up on."""

    def __init__(
        self,
        core: Link,
        *,
        session: SessionId,
        identity: Identity,
        connect_timeout_s: float,
        transport: Transport,
        fabric: SessionFabric,
        listener: SessionListener,
        owner: LinkOwner,
        counters: Callable[[], Counters],
        clock: Callable[[], float],
    ) -> None:
        self.core = core
        self.session = session
        self.address = transport.address
        self.peer: PeerSession | None = None
        self.warning = ""  # the last one of the machine
        self._identity = identity
        self._connect_timeout_s = connect_timeout_s
        self._transport = transport
        self._fabric = fabric
        self._listener = listener
        self._owner = owner
        self._counters = counters
        self._clock = clock
        self._carriers: dict[int, frozenset[int]] = {}  # by rank of the peer that we may write to
        self._carrying = 0  # registrations that are asked for
        self._pending: deque[effects.Effect] = deque()
        self._applying = False
        self._timer: asyncio.TimerHandle | None = None
        self._finished = asyncio.Event()

    @property
    def names(self) -> frozenset[str]:
        """In the peer's certificate."""
        return self._transport.names

    async def run(self) -> None:
        """Serves the link to its end: returns when the fence is confirmed."""
        transport = self._transport
        try:
            self._apply(self.core.opened(self._clock()))
            while (data := await transport.receive()) is not None:
                self._apply(self.core.receive(data, self._clock()))
        finally:
            cause = transport.cause or "stopped on this node"
            self._apply(self.core.transport_closed(cause, self._clock()))
        await self.wait_finished()

    async def wait_finished(self) -> None:
        """The fence is confirmed and the socket closed."""
        await self._finished.wait()
        await self._transport.wait_closed()

    @property
    def over(self) -> bool:
        return self.core.state in OVER

    @property
    def usable(self) -> bool:
        """Takes new work: up, not draining, getting on."""
        return self.core.state is State.UP and not self.core.draining and not self.core.stalled

    def bare_groups(self) -> list[int]:
        """Device groups of a session that is up of which no NIC carries anything now."""
        live = {here for here, _ in self.core.live_pairs}
        gone = {here for here, _ in self.core.gone_pairs}
        groups = enumerate(self._identity.devices.nics)
        return [group for group, nics in groups if gone & nics and not live & nics]

    def close(self, text: str) -> None:
        self._apply(self.core.close(text, self._clock()))

    def drain(self, wanted: bool) -> None:
        self._apply(self.core.drain(wanted))

    def put(self, frame: wire.Frame) -> None:
        """Outbox of the session."""
        self._transport.send(wire.encode(frame))

    def fabric_event(self, found: FabricEvent) -> None:
        """opened, carried, connected, probed, lost or fenced, of this session."""
        now, pair = self._clock(), found.pair
        match found.kind:
            case "opened":
                self._described(self.core.session_opened)
            case "carried":
                self._carried(found.text)
            case "connected":
                self._apply(self.core.pair_connected(pair, now))
            case "probed":
                self._apply(self.core.pair_probed(pair, now))
            case "lost":
                self._apply(self.core.pair_lost(pair, found.text, now))
            case "fenced" if pair[0] < 0:
                self._apply(self.core.session_fenced(now))
            case "fenced":
                self._apply(self.core.pair_fenced(pair, now))
            case kind:
                raise AssertionError(kind)

    # effects

    def _apply(self, found: list[effects.Effect]) -> None:
        self._pending += found
        if self._applying:
            return
        self._applying = True
        try:
            while self._pending:
                self._carry_out(self._pending.popleft())
        finally:
            self._applying = False
        self._arm()

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.SendFrame():
                self.put(effect.frame)
            case effects.Admit():
                self._admit(effect)
            case (
                effects.OpenSession()
                | effects.Reopen()
                | effects.SetRemote()
                | effects.Connect()
                | effects.Probe()
                | effects.FencePair()
                | effects.Carry()
            ):
                self._call_fabric(effect)
            case effects.Fence():
                self._fence()
            case effects.CloseTransport():
                self._transport.close(effect.text)
            case effects.Warn():
                self.warning = effect.text
                node = self.core.peer_node
                event(_log, logging.WARNING, "peer.warning", "link", peer=node, cause=effect.text)
            case (
                effects.SessionUp()
                | effects.Deliver()
                | effects.PairLost()
                | effects.PairFenced()
                | effects.PairUp()
                | effects.SessionLost()
                | effects.Finished()
            ):
                self._tell(effect)
            case _:
                assert_never(effect)

    def _admit(self, effect: effects.Admit) -> None:
        self._transport.proved()
        reasons = self._owner.link_admit(self, effect.node)
        now = self._clock()
        self._pending += self.core.refuse(reasons, now) if reasons else self.core.admit(now)

    def _call_fabric(
        self,
        effect: effects.OpenSession
        | effects.Reopen
        | effects.SetRemote
        | effects.Connect
        | effects.Probe
        | effects.FencePair
        | effects.Carry,
    ) -> None:
        fabric, session, identity = self._fabric, self.session, self._identity
        try:
            match effect:
                case effects.OpenSession():
                    nics = [nic.nic for nic in identity.nics]
                    writable = list(identity.regions.values())
                    fabric.open_session(session, nics, writable, effect.token)
                case effects.Reopen():
                    writable = list(identity.regions.values())
                    fabric.open_session(session, [effect.nic], writable, effect.token)
                case effects.SetRemote():
                    self._know(effect.regions)
                    fabric.set_remote(session, [_to_fabric(region) for region in effect.regions])
                case effects.Connect():
                    deadline_s = self._connect_timeout_s
                    fabric.connect(session, effect.pair, effect.endpoint, deadline_s)
                case effects.Probe():
                    fabric.probe(session, effect.answer)
                case effects.FencePair():
                    fabric.fence(session, effect.pair)
                case effects.Carry():
                    self._carry(effect)
        except FabricError as error:
            opened = not isinstance(effect, effects.OpenSession)
            lost = self.core.fabric_failed(str(error), self._clock(), opened=opened)
            if lost:  # what was to follow the failed call is void; if the link is over, it is not
                self._pending.clear()
            self._pending += lost

    def _carry(self, effect: effects.Carry) -> None:
        identity = self._identity
        for rank in effect.ranks:
            group = identity.devices.carrier(identity.homes.get(rank, 0), effect.nics)
            assert group is not None, "the machine names NICs of this session"
            self._fabric.carry(self.session, identity.regions[rank], group)
            self._carrying += 1
            event(
                _log, logging.WARNING, "nic.carried", "memory goes over another group's NICs",
                peer=self.core.peer_node, rank=rank, group=group,
            )  # fmt: skip

    def _carried(self, cause: str) -> None:
        self._carrying -= 1
        if cause:
            self._apply(self.core.fabric_failed(cause, self._clock()))
        elif self._carrying == 0:
            self._described(lambda _, regions, now: self.core.carried(regions, now))

    def _know(self, regions: Sequence[wire.RegionDescriptor]) -> None:
        self._carriers = {
            region.rank: frozenset(piece.nic for piece in region.pieces)
            for region in regions
            if region.rank != SCRATCH_RANK
        }
        if self.peer is not None:
            self.peer.carriers = self._carriers

    def _described(
        self,
        tell: Callable[
            [list[wire.NicAddress], list[wire.RegionDescriptor], float], list[effects.Effect]
        ],
    ) -> None:
        """Our NICs and descriptors, as they are now, for the machine."""
        if self.over:
            return
        fabric, session, now = self._fabric, self.session, self._clock()
        ranks = {region: rank for rank, region in self._identity.regions.items()}
        ranks[_NO_REGION] = SCRATCH_RANK
        nics = list(self._identity.nics)
        try:
            if fabric.limits["endpoint"] == "rdm":
                nics = [
                    wire.NicAddress(
                        nic.nic, nic.name, fabric.endpoint_name(session, nic.nic), nic.ranks
                    )
                    for nic in nics
                ]
            regions = [
                wire.RegionDescriptor(ranks[region], [wire.RegionPiece(*piece) for piece in pieces])
                for region, pieces in fabric.descriptors(session)
            ]
        except FabricError as error:  # fenced in the meantime
            self._apply(self.core.fabric_failed(str(error), now))
        else:
            self._apply(tell(nics, regions, now))

    def _fence(self) -> None:
        try:
            self._fabric.fence(self.session)
        except FabricError as error:
            # Nothing may be freed now; the machine goes on waiting and warns.
            node = self.core.peer_node
            event(_log, logging.ERROR, "peer.fence_failed", "fence", peer=node, cause=str(error))

    def _tell(
        self,
        effect: effects.SessionUp
        | effects.Deliver
        | effects.PairLost
        | effects.PairFenced
        | effects.PairUp
        | effects.SessionLost
        | effects.Finished,
    ) -> None:
        """What the messenger and the manager hear."""
        listener, peer = self._listener, self.peer
        match effect:
            case effects.SessionUp():
                self.peer = peer = self._make_session(effect)
                self._owner.link_up(self)
                listener.session_up(peer)
            case effects.SessionLost():
                if peer is not None:
                    peer.up = False
                self._owner.link_lost(self, effect)
                if peer is not None:
                    listener.session_lost(peer, effect.cause, silent=effect.silent)
            case effects.Finished():
                self._finished.set()
                self._owner.link_finished(self)
                if peer is not None:
                    listener.session_fenced(peer)
            case effects.Deliver():
                assert peer is not None
                peer.draining = self.core.draining
                listener.session_frame(peer, effect.frame)
            case effects.PairLost():
                assert peer is not None
                self._forget_pair(peer, effect.pair)
                listener.pair_lost(peer, effect.pair, effect.cause)
            case effects.PairFenced():
                assert peer is not None
                self._forget_pair(peer, effect.pair)
                peer.lent += effect.lent
                listener.pair_fenced(peer, effect.pair)
            case effects.PairUp():
                assert peer is not None
                peer.pairs = (*peer.pairs, effect.pair)
                listener.pair_up(peer, effect.pair)

    def _make_session(self, up: effects.SessionUp) -> PeerSession:
        hello = up.hello
        return PeerSession(
            session=self.session,
            node=NodeId(hello.node),
            boot=BootId(hello.boot),
            role=Role(hello.role),
            hello=hello,
            geometry=up.agreement.geometry,
            regions={rank: rank for rank in sorted(self._carriers)},
            pairs=up.pairs,
            carriers=self._carriers,
            groups=up.agreement.groups,
            outbox=self,
        )

    def _forget_pair(self, peer: PeerSession, pair: Pair) -> None:
        peer.pairs = tuple(other for other in peer.pairs if other != pair)

    # timer

    def _arm(self) -> None:
        if self.peer is not None:
            self.peer.rtt_s = self.core.rtt_s
            self.peer.last_heartbeat = self.core.last_heartbeat
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.core.next_at
        if at is not None:
            delay_s = max(0.0, at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._apply(self.core.tick(self._clock(), self._counters()))


def _to_fabric(region: wire.RegionDescriptor) -> tuple[int, list[Piece]]:
    return (
        region.rank,
        [(piece.nic, piece.offset, piece.length, piece.base, piece.key) for piece in region.pieces],
    )
