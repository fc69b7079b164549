"""What a peer link is made of: the fields of core/link.py's machine, and the least of its steps."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

from pdnode.core import wire
from pdnode.core.carriers import Carriers
from pdnode.core.cooldown import Cooldowns
from pdnode.core.heartbeat import Liveness
from pdnode.core.link_effects import Carry, Effect, Pair, SendFrame, SetRemote
from pdnode.core.link_state import HANDSHAKE, SESSION_STEPS, LinkSettings, State
from pdnode.core.nic_return import NicReturns
from pdnode.core.nics import joined_ranks, nic_pairs
from pdnode.core.peer import Broken, Peer
from pdnode.types import Role


class LinkParts:
    """What a link holds, what its owner may read, and how it sends."""

    def __init__(
        self,
        hello: wire.Hello,
        settings: LinkSettings,
        *,
        nonce: bytes,
        session_token: bytes,
        cooldowns: Cooldowns | None = None,
    ) -> None:
        assert hello.role in (Role.DECODE, Role.PREFILL), hello.role
        assert len(nonce) == wire.NONCE_BYTES
        assert len(session_token) == wire.SESSION_TOKEN_BYTES
        self.state = State.NEW
        self.live_pairs: set[Pair] = set()
        self.causes: dict[Pair, str] = {}  # why each pair was lost last
        self.draining = False  # the peer said Drain
        self.fence_late = False  # FENCING has lasted longer than a step may
        self._hello = hello
        self._settings = settings
        self._decode = hello.role == Role.DECODE
        self._session_token = session_token
        self._cooldowns = cooldowns
        self._peer = Peer(hello, settings.token, nonce=nonce)
        self._liveness: Liveness | None = None
        self._deadline = 0.0
        self._fabric_open = False
        self._drain_wanted = False
        self._nics: tuple[wire.NicAddress, ...] = ()
        self._returns: NicReturns | None = None  # once the session is up
        self._remote: list[wire.RegionDescriptor] = []
        self._left_out: dict[Pair, float] = {}  # pairs that cool down, and until when
        self._scratch: list[wire.RegionDescriptor] = []
        self._carriers: Carriers | None = None  # on a decode node, once its session is open
        self._offer: wire.SessionOffer | None = None
        self._pairs: tuple[Pair, ...] = ()
        self._connected: set[Pair] = set()
        self._probed: set[Pair] = set()
        self._sent_probed = False
        self._peer_probed = False
        self._out: list[Effect] = []

    # what the owner may read

    @property
    def peer_node(self) -> str | None:
        """The peer's node id, once it has proved that it holds the token."""
        party = self._peer.party
        return party.node if party is not None and self._peer.authenticated else None

    @property
    def peer_role(self) -> str | None:
        party = self._peer.party
        return party.role if party is not None and self._peer.authenticated else None

    @property
    def rtt_s(self) -> float:
        return self._liveness.rtt_s if self._liveness else 0.0

    @property
    def heard_at(self) -> float | None:
        """When the last frame came, once heartbeats run."""
        return self._liveness.heard_at if self._liveness else None

    @property
    def stalled(self) -> bool:
        """Busy without progress: see core/heartbeat.py."""
        return self._liveness.stalled if self._liveness else False

    @property
    def last_heartbeat(self) -> wire.Heartbeat | None:
        return self._liveness.last if self._liveness else None

    @property
    def offered(self) -> tuple[wire.NicAddress, ...]:
        """On a decode node: the NICs of the peer, once it has offered them."""
        return () if self._offer is None else tuple(self._offer.nics)

    @property
    def known_pairs(self) -> tuple[Pair, ...]:
        """On a decode node: every NIC pair of the session, also those that carry nothing."""
        if self._offer is None or not self._nics:
            return ()
        return self._all_pairs(self._offer.nics)

    @property
    def gone_pairs(self) -> list[Pair]:
        """NIC pairs of a session that is up which carry nothing now."""
        return self._returns.gone if self._returns is not None else []

    @property
    def next_at(self) -> float | None:
        """When `tick` has something to do, or None."""
        times = []
        if self.state in HANDSHAKE or (self.state is State.FENCING and not self.fence_late):
            times.append(self._deadline)
        if self._liveness is not None and self.state in SESSION_STEPS:
            times.append(self._liveness.next_at)
        if self._returns is not None and self._returns.next_at is not None:
            times.append(self._returns.next_at)
        return min(times, default=None)

    # inside

    def _all_pairs(self, offered: Sequence[wire.NicAddress]) -> tuple[Pair, ...]:
        """On a decode node: its pairs with the NICs that the peer has offered."""
        _, agreed = self._peer.agreed()
        ranks = joined_ranks(
            agreed.own, agreed.geometry,
            decode_groups=agreed.own_groups, prefill_groups=agreed.groups,
        )  # fmt: skip
        return nic_pairs(self._nics, sorted(offered, key=lambda nic: nic.nic), ranks)

    def _enter(self, state: State, now: float) -> None:
        self.state = state
        self._deadline = now + self._settings.step_timeout_s

    def _cover(self, pairs: Iterable[Pair]) -> bool:
        """Decode: whether every rank is reached over `pairs`; else that is being seen to."""
        assert self._carriers is not None
        wanted = self._carriers.want(pairs)
        if wanted is not None:
            self._out.append(Carry(*wanted))
        return self._carriers.asked is None

    def _begin_heartbeats(self, now: float) -> None:
        settings = self._settings
        self._liveness = Liveness(
            now,
            heartbeat_s=settings.heartbeat_s,
            link_lost_s=settings.link_lost_s,
            stall_s=settings.stall_s,
        )

    def _set_remote(self, regions: list[wire.RegionDescriptor]) -> None:
        self._remote = regions
        self._out.append(SetRemote(tuple(regions)))

    def _suspect(self, pairs: set[Pair], now: float) -> None:
        """These pairs kept the session from coming up: the next one begins without them."""
        if self._cooldowns is not None and self.state in (State.CONNECT, State.PROBE):
            for pair in pairs & set(self._pairs):
                self._cooldowns.lost(pair, now)

    def _require(self, wrong: str | None) -> None:
        if wrong is not None:
            raise Broken(wrong)

    def _out_of_place(self, frame: wire.Frame) -> NoReturn:
        side = "prefill" if self._decode else "decode"
        name = wire.tag(frame)
        raise Broken(f"{name} from a {side} node is not taken in the step {self.state.value}")

    def _send(self, frame: wire.Frame) -> None:
        self._out.append(SendFrame(frame))

    def _flush(self) -> list[Effect]:
        out, self._out = self._out, []
        return out
