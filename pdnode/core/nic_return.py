"""The return of NIC pairs to a session that is up: new registrations, a new connection, a probe.

A part of the link's machine (core/link.py), pure like it. The decode node drives, because it dials:

    decode node                                 prefill node
    DOWN     pair fenced; the cool-down runs    DOWN     pair fenced
    OPENING  registers the NIC anew
    ASKED    → NicUp with its new keys          FENCING  ← NicUp: whatever is left is closed
                                                OPENING  registers anew
    DIALED   ← NicUp, dials                     DIALED   → NicUp with its scratch page's new key
    PROBING  connected: probes                  PROBING  connected: probes
    live     probed                             live     probed

The core writes no page over a connection that is not probed, so up to DIALED an attempt can fail
without a word: it is fenced here, and the next NicUp makes the peer do the same. Later the peer may
have written over it, and the loss is that of a live pair: nic_fenced, and everything is replayed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdnode.core import link_effects as effects
from pdnode.core import wire
from pdnode.core.cooldown import Cooldowns
from pdnode.core.geometry import KvGeometry
from pdnode.core.nics import SCRATCH_RANK, Pair, regions_objection


class Step(StrEnum):
    FENCING = "fencing"  # by this machine: its end is no news for the messenger
    LOST = "lost"  # the messenger fences it
    DOWN = "down"
    WAITING = "waiting"  # for another pair's registration
    OPENING = "opening"
    ASKED = "asked"
    DIALED = "dialed"
    PROBING = "probing"


@dataclass(slots=True)
class _Gone:
    step: Step
    at: float | None = None  # DOWN: when to try again (decode); later: the attempt's deadline
    asked: wire.NicUp | None = None  # prefill: what is to be answered
    held: bool = False  # DOWN: the peer does not know yet that it is fenced
    answer: wire.NicUp | None = None  # prefill, both_connect: to be sent once connected


class NicReturns:
    """Pairs are (local, remote). `emit` takes effects; `attempt_s` bounds a step of an attempt.

    `cooldowns` None: this side waits to be asked (prefill). `both_connect`: FI_EP_RDM, where the
    prefill node dials as well: before it answers, and its probe waits for the decode node's.
    `left_out`: pairs that the session began without, and when to try them.
    """

    def __init__(
        self,
        *,
        token: bytes,
        nics: Sequence[wire.NicAddress],
        remote: Sequence[wire.RegionDescriptor],
        cooldowns: Cooldowns | None,
        attempt_s: float,
        both_connect: bool,
        left_out: Mapping[Pair, float],
        emit: Callable[[effects.Effect], None],
    ) -> None:
        self._token = token
        self._nics = {nic.nic: nic for nic in nics}
        self._remote = list(remote)
        self._cooldowns = cooldowns
        self._attempt_s = attempt_s
        self._both_connect = both_connect
        self._emit = emit
        self._gone = {pair: _Gone(Step.DOWN, at) for pair, at in left_out.items()}
        self._opening: Pair | None = None  # one at a time: `opened` does not name its NIC
        self._waiting: list[Pair] = []

    @property
    def gone(self) -> list[Pair]:
        """Pairs of the session that carry nothing now."""
        return sorted(self._gone)

    @property
    def next_at(self) -> float | None:
        waiting = (g.at for g in self._gone.values() if g.at is not None and not g.held)
        return min(waiting, default=None)

    def tick(self, now: float) -> None:
        for pair, gone in list(self._gone.items()):
            if gone.at is None or gone.held or now < gone.at:
                continue
            if gone.step is Step.DOWN:
                self._open(pair, now)
            else:
                self.lost(pair, f"no return within {self._attempt_s:g} s", now)

    # what happened to a pair

    def lost(self, pair: Pair, cause: str, now: float) -> None:
        """A pair that is not live: an attempt failed, or it is lost already."""
        gone = self._gone.get(pair)
        if gone is None or gone.step in (Step.DOWN, Step.WAITING, Step.LOST, Step.FENCING):
            return
        if self._cooldowns is not None and gone.step is Step.PROBING:
            self._cooldowns.failed(pair, now)
            self._enter(pair, Step.LOST, None)
            self._emit(effects.PairLost(pair, cause))
            return
        if self._cooldowns is not None:
            self._cooldowns.failed(pair, now)
        gone.asked = gone.answer = None
        self._fence(pair)

    def down(self, pair: Pair, now: float) -> None:
        """A live pair was lost; the messenger fences it."""
        if self._cooldowns is not None:
            self._cooldowns.lost(pair, now)
        self._gone[pair] = _Gone(Step.LOST)

    def fenced(self, pair: Pair, now: float) -> bool:
        """A fence of this pair is done. Whether the messenger is to hear of it."""
        gone = self._gone.get(pair)
        if gone is not None and gone.step in (Step.OPENING, Step.WAITING, Step.DOWN):
            return gone.step is Step.DOWN  # an earlier one: link and messenger may both have asked
        quiet = gone is not None and gone.step is Step.FENCING
        if gone is not None and gone.asked is not None:
            self._open(pair, now)
        else:
            until = None if self._cooldowns is None else self._cooldowns.lost(pair, now)
            self._enter(pair, Step.DOWN, until)
        return not quiet

    def hold(self, pair: Pair, *, until_told: bool) -> None:
        """A pair that is fenced comes back no sooner than the peer has been told of the fence: it
        would take the word for that of a later one, and nobody would fence it again."""
        self._gone[pair].held = until_told

    def opened(
        self, nics: Sequence[wire.NicAddress], regions: Sequence[wire.RegionDescriptor], now: float
    ) -> None:
        """The registration that was asked for is there."""
        pair, self._opening = self._opening, None
        if pair is not None and self._gone[pair].step is Step.OPENING:
            gone = self._gone[pair]
            self._nics |= {nic.nic: nic for nic in nics}
            own = [
                wire.RegionDescriptor(
                    region.rank, [piece for piece in region.pieces if piece.nic == pair[0]]
                )
                for region in regions
            ]
            own = [region for region in own if region.pieces]
            if gone.asked is None:
                wired, step = pair, Step.ASKED
            else:
                wired, step = (pair[1], pair[0]), Step.DIALED
            self._enter(pair, step, now + self._attempt_s)
            frame = wire.NicUp(wired, self._nics[pair[0]], self._token, own)
            if gone.asked is not None and self._both_connect:
                gone.answer = frame
                self._emit(effects.Connect(pair, gone.asked.nic.endpoint))
            else:
                self._emit(effects.SendFrame(frame))
            gone.asked = None
        while self._waiting and self._opening is None:
            pair = self._waiting.pop(0)
            if self._gone[pair].step is Step.WAITING:
                self._open(pair, now)

    def objection(self, frame: wire.NicUp) -> str | None:
        """Why this pair cannot return, or None. An answer that comes late is no fault."""
        ours = frame.pair[1 if self._cooldowns is None else 0]
        return None if ours in self._nics else f"NIC {ours} of {frame.pair} was not offered"

    def asked(self, frame: wire.NicUp) -> None:
        """Prefill: the decode node wants this pair back. Whatever there is of it is closed.

        Its descriptors hold from now on: what it lends to this NIC later must not be lost again.
        """
        pair = (frame.pair[1], frame.pair[0])
        self._know(frame)
        self._enter(pair, Step.FENCING, None)
        self._gone[pair].asked = frame
        self._emit(effects.FencePair(pair))

    def answered(self, frame: wire.NicUp, now: float) -> None:
        """Decode: the prefill node is ready for our connection."""
        pair = frame.pair
        gone = self._gone.get(pair)
        if gone is None or gone.step is not Step.ASKED:
            return  # of an attempt that was given up
        self._know(frame)
        self._enter(pair, Step.DIALED, now + self._attempt_s)
        self._emit(effects.Connect(pair, frame.nic.endpoint))

    def connected(self, pair: Pair, now: float) -> None:
        gone = self._gone.get(pair)
        if gone is not None and gone.step is Step.DIALED:
            self._enter(pair, Step.PROBING, now + self._attempt_s)
            answers = gone.answer is not None
            if gone.answer is not None:
                self._emit(effects.SendFrame(gone.answer))
                gone.answer = None
            self._emit(effects.Probe(answers))

    def probed(self, pair: Pair, now: float) -> bool:
        """Whether the pair is live from now on."""
        gone = self._gone.get(pair)
        if gone is None or gone.step is not Step.PROBING:
            return False
        del self._gone[pair]
        if self._cooldowns is not None:
            self._cooldowns.back(pair, now)
        return True

    # inside

    def _enter(self, pair: Pair, step: Step, at: float | None) -> None:
        gone = self._gone.setdefault(pair, _Gone(step))
        gone.step, gone.at = step, at

    def _fence(self, pair: Pair) -> None:
        self._enter(pair, Step.FENCING, None)
        self._emit(effects.FencePair(pair))

    def _open(self, pair: Pair, now: float) -> None:
        if self._opening is not None:
            self._enter(pair, Step.WAITING, None)
            self._waiting.append(pair)
            return
        self._opening = pair
        self._enter(pair, Step.OPENING, now + self._attempt_s)
        self._emit(effects.Reopen(pair[0], self._token))

    def lent_objection(
        self, regions: Sequence[wire.RegionDescriptor], geometry: KvGeometry, groups: int
    ) -> str | None:
        """What is wrong with memory that the peer lends to NICs of another device group."""
        nics = {piece.nic for region in self._remote for piece in region.pieces}
        strange = {piece.nic for region in regions for piece in region.pieces} - nics
        if strange:
            return f"NIC {min(strange)} has no part in this session"
        if not {region.rank for region in regions} <= {region.rank for region in self._remote}:
            return "a rank is lent that this session has not"
        whole = joined(self._remote, regions)
        return regions_objection(whole, set(), geometry, groups, reach=nics)

    def lent(self, regions: Sequence[wire.RegionDescriptor]) -> None:
        self._remote = joined(self._remote, regions)
        self._emit(effects.SetRemote(tuple(self._remote)))

    def _know(self, frame: wire.NicUp) -> None:
        """The peer's descriptors, with those of the NIC that returns replaced."""
        self._remote = merged(self._remote, frame.regions, frame.nic.nic)
        self._emit(effects.SetRemote(tuple(self._remote)))


def merged(
    known: Iterable[wire.RegionDescriptor], new: Sequence[wire.RegionDescriptor], nic: int
) -> list[wire.RegionDescriptor]:
    """`known` with the pieces of `nic` replaced by those of `new`."""
    fresh = {region.rank: region.pieces for region in new}
    return [
        wire.RegionDescriptor(
            region.rank,
            [piece for piece in region.pieces if piece.nic != nic] + fresh.get(region.rank, []),
        )
        for region in known
    ]


def joined(
    known: Iterable[wire.RegionDescriptor], new: Sequence[wire.RegionDescriptor]
) -> list[wire.RegionDescriptor]:
    """`known` with the pieces of `new`, which replace those of the same rank and NIC."""
    fresh = {region.rank: region.pieces for region in new}
    found = []
    for region in known:
        pieces = fresh.get(region.rank, [])
        nics = {piece.nic for piece in pieces}
        kept = [piece for piece in region.pieces if piece.nic not in nics]
        found.append(wire.RegionDescriptor(region.rank, kept + pieces))
    return found


def return_objection(
    frame: wire.NicUp,
    known: Sequence[wire.RegionDescriptor],
    token: bytes,
    geometry: KvGeometry | None,
    groups: int = 1,
    *,
    decode: bool,
) -> str | None:
    """What is wrong with a peer's NicUp, or None. `known`: its regions; `geometry` and `groups` as
    in `regions_objection`; `decode`: we are the decode node."""
    nic = frame.nic.nic
    if frame.token != token:
        return "token: not that of this session"
    if nic != frame.pair[1 if decode else 0]:
        return f"NIC {nic} is not that of the pair {frame.pair}"
    had = {region.rank for region in known if any(piece.nic == nic for piece in region.pieces)}
    if not had:
        return f"NIC {nic} has no part in this session"
    whole = merged(known, frame.regions, nic)
    missing = had - {SCRATCH_RANK} - {region.rank for region in frame.regions}
    if missing and geometry is not None:
        return f"rank {min(missing)} is registered with NIC {nic} no more"
    reach = {piece.nic for region in known for piece in region.pieces}
    return regions_objection(whole, {nic}, geometry, groups, reach=reach)
