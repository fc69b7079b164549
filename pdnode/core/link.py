"""The peer link: one pure state machine for one WebSocket, from the first frame to the fence.

No clock and no I/O: time comes in as `now` (monotonic seconds), facts come in as method calls, and
each call returns the effects to carry out, in order. Both sides run the same class; the decode node
is the one that dialed. A reconnect is a new machine with nothing carried over.

    decode node (dials)                    prefill node (accepts)
    NEW      → Auth                        NEW
    AUTH     ← AuthReply                   AUTH     ← Auth       → AuthReply
    ADMIT    local        → AuthProof      PROOF    ← AuthProof
                          → Hello          HELLO    ← Hello
    HELLO    ← Hello                       ADMIT    local        → Hello
    OFFER    ← SessionOffer                OPENING  fabric       → SessionOffer
    OPENING  fabric       → SessionAnswer  ANSWER   ← SessionAnswer
    CONNECT  ← SessionReady, all connected CONNECT  all connected → SessionReady
    PROBE    ← Probed, own probes → Probed PROBE    ← Probed, own probes → Probed
    UP                                     UP
                any loss: FENCING (if a session was opened) → CLOSED

Three rules hold in every state. Whatever ends the link (a frame out of place, silence, a deadline,
the transport, a local decision) fences first and tells afterwards. A frame that has no place in the
table above closes the link with a cause that names it; after that frames are ignored. Every step
up to UP has its own deadline.
"""

from pdnode.core import wire
from pdnode.core.auth import Step
from pdnode.core.carriers import Carriers
from pdnode.core.heartbeat import Counters
from pdnode.core.link_effects import (
    Admit,
    CloseTransport,
    Connect,
    Deliver,
    Effect,
    Fence,
    Finished,
    OpenSession,
    Pair,
    PairFenced,
    PairLost,
    PairUp,
    Probe,
    SessionLost,
    SessionUp,
    Warn,
)
from pdnode.core.link_parts import LinkParts
from pdnode.core.link_state import HANDSHAKE, OVER, SESSION_STEPS, State
from pdnode.core.nic_return import NicReturns, return_objection
from pdnode.core.nics import answer_objection, nics_objection, regions_objection
from pdnode.core.peer import Broken


class Link(LinkParts):
    """One link. `nonce` (32 random bytes) and `session_token` (16) must never be used twice.

    `cooldowns`: of this peer's NIC pairs, on the decode node, which brings them back.
    """

    # inputs: transport

    def opened(self, now: float) -> list[Effect]:
        """The WebSocket is there. Once, before anything else."""
        assert self.state is State.NEW
        self._enter(State.AUTH, now)
        if self._decode:
            self._send(wire.Auth(*self._peer.me))
        return self._flush()

    def receive(self, data: bytes, now: float) -> list[Effect]:
        """One binary message of the WebSocket. Never raises, whatever the bytes are."""
        assert self.state is not State.NEW
        if self.state in OVER:
            return []
        if self._liveness is not None:
            self._liveness.heard(now)
        try:
            self._take(wire.decode(data), now)
        except wire.WireError as error:
            self._lose(str(error), now, say=True)
        except Broken as error:
            self._lose(f"protocol: {error}", now, say=True)
        return self._flush()

    def transport_closed(self, cause: str, now: float) -> list[Effect]:
        if self.state not in OVER:
            self._lose(wire.clip(cause), now)
        return self._flush()

    def tick(self, now: float, counters: Counters) -> list[Effect]:
        """Call at `next_at` or later: deadlines, silence, and the heartbeat that is due."""
        if self.state is State.FENCING and not self.fence_late and now >= self._deadline:
            self.fence_late = True
            self._out.append(Warn("the fence is not confirmed; its pages stay quarantined"))
        elif self.state in HANDSHAKE and now >= self._deadline:
            step = self.state.value
            there = self._probed if self.state is State.PROBE else self._connected
            self._suspect(set(self._pairs) - there, now)
            self._lose(f"no {step} within {self._settings.step_timeout_s:g} s", now, say=True)
        elif self._liveness is not None and self.state in SESSION_STEPS:
            if self._liveness.silent(now):
                text = f"silent for {self._settings.link_lost_s:g} s"
                self._lose(text, now, say=True, silent=True)
            elif self._liveness.due(now):
                self._send(self._liveness.beat(now, self._hello.boot, counters))
            if self._returns is not None:
                self._returns.tick(now)
        return self._flush()

    # inputs: local decisions

    def admit(self, now: float) -> list[Effect]:
        """Answer to Admit: go on."""
        assert self.state is State.ADMIT
        if self._decode:
            self._send(wire.AuthProof(self._peer.sign(Step.PROOF)))
        self._send(self._hello)
        if self._decode:
            self._enter(State.HELLO, now)
        else:
            self._begin_heartbeats(now)
            self._open_session(self._session_token, now)
        return self._flush()

    def refuse(self, reasons: list[str], now: float) -> list[Effect]:
        """Answer to Admit: this node has reasons of its own."""
        assert self.state is State.ADMIT
        self._refuse(reasons, now)
        return self._flush()

    def close(self, text: str, now: float) -> list[Effect]:
        """End the link on purpose (or for a cause found elsewhere). Idempotent, in any state."""
        if self.state not in OVER:
            self._lose(text, now, say=True)
        return self._flush()

    def drain(self, wanted: bool) -> list[Effect]:
        """Tell the peer, now or as soon as the session is up, whether it may dispatch to us."""
        changed = wanted is not self._drain_wanted
        self._drain_wanted = wanted
        if changed and self.state is State.UP:
            self._send(wire.Drain() if wanted else wire.Undrain())
        return self._flush()

    # inputs: facts of the fabric

    def session_opened(
        self,
        nics: list[wire.NicAddress],
        regions: list[wire.RegionDescriptor],
        now: float,
    ) -> list[Effect]:
        """Our NICs' addresses, and what this peer may write to (rank -1: scratch)."""
        if self.state is State.OPENING:
            self._nics = tuple(nics)
            boot = self._hello.boot
            if self._decode:
                assert self._offer is not None
                pairs = self._all_pairs(self._offer.nics)
                if self._cooldowns is not None:
                    self._left_out = self._cooldowns.left_out(pairs, now)
                self._pairs = tuple(pair for pair in pairs if pair not in self._left_out)
                self._carriers = Carriers(regions)
                self._answer(now)
            else:
                self._scratch = regions
                self._send(wire.SessionOffer(boot, self._session_token, nics))
                self._enter(State.ANSWER, now)
        elif self._returns is not None:
            if self._carriers is not None:
                self._carriers.regions = regions
            self._returns.opened(nics, regions, now)
        return self._flush()

    def carried(self, regions: list[wire.RegionDescriptor], now: float) -> list[Effect]:
        """What Carry asked for is registered; all our descriptors, as they are now."""
        if self.state in (State.OPENING, State.UP):
            assert self._carriers is not None
            opening = self.state is State.OPENING
            wrong = self._carriers.take(regions, self._pairs if opening else self.live_pairs)
            if wrong is not None:
                self._lose(wrong, now, say=True)
            elif opening:
                self._answer(now)
            else:
                self._tell_fenced()
        return self._flush()

    def pair_connected(self, pair: Pair, now: float) -> list[Effect]:
        # On the prefill node a connection may come before the answer that announces it.
        if self.state in (State.ANSWER, State.CONNECT):
            self._connected.add(pair)
            self._try_probe(now)
        elif self._returns is not None:
            self._returns.connected(pair, now)
        return self._flush()

    def pair_probed(self, pair: Pair, now: float) -> list[Effect]:
        if self.state is State.PROBE:
            self._probed.add(pair)
            if self._probed >= set(self._pairs) and not self._sent_probed:
                self._sent_probed = True
                self._send(wire.Probed(self._hello.boot))
                self._try_up(now)
        elif self._returns is not None and self._returns.probed(pair, now):
            self.live_pairs.add(pair)
            self._out.append(PairUp(pair))
        return self._flush()

    def pair_lost(self, pair: Pair, cause: str, now: float) -> list[Effect]:
        """A connection died. Before UP that ends the link; later only the last one does."""
        self.causes[pair] = wire.clip(cause)
        if self._returns is None:
            if self.state not in OVER:
                self._suspect({pair}, now)
                self._lose(f"NIC pair {pair}: {cause}", now, say=True)
        elif pair in self.live_pairs:
            self.live_pairs.discard(pair)
            self._returns.down(pair, now)
            self._out.append(PairLost(pair, cause))
            if not self.live_pairs:
                self._lose(f"all NIC pairs are lost, the last one {pair}: {cause}", now, say=True)
        else:
            self._returns.lost(pair, cause, now)
        return self._flush()

    def pair_fenced(self, pair: Pair, now: float) -> list[Effect]:
        if self._returns is not None:
            self.live_pairs.discard(pair)
            told = self._returns.fenced(pair, now)
            if told and self._carriers is not None and self.live_pairs:
                self._carriers.fenced.append(pair)
                self._returns.hold(pair, until_told=True)
                self._tell_fenced()
            elif told:
                self._out.append(PairFenced(pair))
            if not self.live_pairs:
                self._lose("all NIC pairs are fenced", now, say=True)
        return self._flush()

    def fabric_failed(self, cause: str, now: float, *, opened: bool = True) -> list[Effect]:
        """A fabric call that an effect asked for was refused; not `opened`: OpenSession's was."""
        self._fabric_open = self._fabric_open and opened
        if self.state not in OVER:
            self._lose(f"fabric: {cause}", now, say=True)
        return self._flush()

    def session_fenced(self, now: float) -> list[Effect]:
        """The whole session is closed: the end of FENCING, or someone fenced without asking us."""
        if self.state not in OVER and self._fabric_open:
            self._lose("the session was fenced on this node", now, say=True)
        if self.state is State.FENCING:
            self._finish()
        return self._flush()

    # frames

    def _take(self, frame: wire.Frame, now: float) -> None:
        """The table of states and frames. What it does not name is out of place."""
        match self._decode, self.state, frame:
            case _, _, wire.Bye():
                self._lose(f"closed by the peer: {wire.clip(frame.text)}", now)
            case _, state, wire.Refuse() if state is not State.UP:
                reasons = "; ".join(wire.clip(reason) for reason in frame.reasons)
                self._lose(f"refused by the peer: {reasons}", now, refused=True)
            case False, State.AUTH, wire.Auth():
                self._peer.take_auth(frame)
                self._send(wire.AuthReply(*self._peer.me, mac=self._peer.sign(Step.REPLY)))
                self._enter(State.PROOF, now)
            case True, State.AUTH, wire.AuthReply():
                self._peer.take_auth(frame)
                self._authenticate(Step.REPLY, frame.mac, now)
            case False, State.PROOF, wire.AuthProof():
                self._authenticate(Step.PROOF, frame.mac, now)
            case _, State.HELLO, wire.Hello():
                self._take_hello(frame, now)
            case _, state, wire.Heartbeat() if state in SESSION_STEPS:
                self._take_heartbeat(frame, now)
            case True, State.OFFER, wire.SessionOffer():
                self._peer.check_boot(frame.boot)
                self._require(nics_objection(frame.nics))
                self._offer = frame
                self._open_session(frame.token, now)
            case False, State.ANSWER, wire.SessionAnswer():
                self._take_answer(frame, now)
            case True, State.CONNECT, wire.SessionReady() if not self._remote:
                self._peer.check_boot(frame.boot)
                used = {remote for _, remote in self._pairs}
                self._require(regions_objection(frame.regions, used, None))
                self._set_remote(frame.regions)
                self._try_probe(now)
            case _, State.PROBE, wire.Probed() if not self._peer_probed:
                self._peer.check_boot(frame.boot)
                self._peer_probed = True
                self._try_up(now)
            case _, State.UP, _:
                self._take_message(frame, now)
            case _:
                self._out_of_place(frame)

    def _take_message(self, frame: wire.Frame, now: float) -> None:
        """A frame for the messenger, if it comes from the side that sends such frames."""
        match self._decode, frame:
            case True, (
                wire.Accepted() | wire.Progress() | wire.Sent() | wire.Failed() | wire.Drained()
            ):
                self._peer.check_key(frame.key)
            case False, wire.Dispatch() | wire.Cancel() | wire.Regrant():
                self._peer.check_key(frame.key)
            case True, wire.NicDown():
                pass
            case False, wire.NicFenced(regions=lent):
                if lent and self._returns is not None:
                    _, agreed = self._peer.agreed()
                    self._require(
                        self._returns.lent_objection(lent, agreed.geometry, agreed.groups)
                    )
                    self._returns.lent(lent)
            case (True, wire.TestWritten()) | (False, wire.TestWrites()):
                pass
            case _, wire.NicUp():
                self._take_nic_up(frame, now)
                return
            case _, wire.Drain():
                self.draining = True
            case _, wire.Undrain():
                self.draining = False
            case _:
                self._out_of_place(frame)
        self._out.append(Deliver(frame))

    def _take_nic_up(self, frame: wire.NicUp, now: float) -> None:
        assert self._returns is not None
        token = self._session_token if self._offer is None else self._offer.token
        _, agreed = self._peer.agreed()
        wrong = return_objection(
            frame,
            self._remote,
            token,
            None if self._decode else agreed.geometry,
            agreed.groups,
            decode=self._decode,
        )
        self._require(wrong or self._returns.objection(frame))
        if self._decode:
            self._returns.answered(frame, now)
        else:
            self.live_pairs.discard((frame.pair[1], frame.pair[0]))
            self._returns.asked(frame)

    def _authenticate(self, step: Step, mac: bytes, now: float) -> None:
        wrong = self._peer.authenticate(step, mac)
        if wrong is not None:
            self._refuse([wrong], now)
        elif self._decode:
            self._ask(now)
        else:
            self._enter(State.HELLO, now)

    def _take_hello(self, frame: wire.Hello, now: float) -> None:
        reasons = self._peer.take_hello(frame)
        if reasons:
            if not self._decode:
                self._send(self._hello)  # so that the decode node can tell both values itself
            self._refuse(reasons, now)
            return
        if self._decode:
            self._begin_heartbeats(now)
            self._enter(State.OFFER, now)
        else:
            self._ask(now)

    def _take_heartbeat(self, frame: wire.Heartbeat, now: float) -> None:
        assert self._liveness is not None
        self._peer.check_boot(frame.boot)
        self._require(self._liveness.objection(frame))
        report = self._liveness.take(frame, now)
        if report is not None:
            self._out.append(Warn(report))

    def _take_answer(self, frame: wire.SessionAnswer, now: float) -> None:
        self._peer.check_boot(frame.boot)
        _, agreement = self._peer.agreed()
        self._require(answer_objection(frame, self._nics, agreement.geometry, agreement.groups))
        self._pairs = tuple((ours, theirs) for theirs, ours in frame.pairs)
        if not self._connected <= set(self._pairs):
            raise Broken("a NIC pair is connected that the answer does not name")
        self._set_remote(frame.regions)
        if self._settings.both_connect:
            endpoints = {nic.nic: nic.endpoint for nic in frame.nics}
            self._out += [Connect(pair, endpoints[pair[1]]) for pair in self._pairs]
        self._enter(State.CONNECT, now)
        self._try_probe(now)

    # steps

    def _answer(self, now: float) -> None:
        assert self._offer is not None
        assert self._carriers is not None
        if not self._cover(self._pairs):
            return
        self._carriers.lent.clear()  # the answer has all
        endpoints = {nic.nic: nic.endpoint for nic in self._offer.nics}
        self._out += [Connect(pair, endpoints[pair[1]]) for pair in self._pairs]
        self._send(
            wire.SessionAnswer(
                self._hello.boot, list(self._nics), list(self._pairs), self._carriers.regions
            )
        )
        self._enter(State.CONNECT, now)

    def _tell_fenced(self) -> None:
        """What is lent goes first: it must be known before anything is asked for again."""
        assert self._carriers is not None
        assert self._returns is not None
        if self._cover(self.live_pairs):
            for pair in self._carriers.fenced:
                self._returns.hold(pair, until_told=False)
                self._out.append(PairFenced(pair, tuple(self._carriers.lent)))
                self._carriers.lent.clear()
            self._carriers.fenced.clear()

    def _ask(self, now: float) -> None:
        assert self.peer_node is not None
        self._enter(State.ADMIT, now)
        self._out.append(Admit(self.peer_node))

    def _open_session(self, token: bytes, now: float) -> None:
        self._fabric_open = True
        self._out.append(OpenSession(token))
        self._enter(State.OPENING, now)

    def _try_probe(self, now: float) -> None:
        if self.state is State.CONNECT and self._remote and self._connected >= set(self._pairs):
            if not self._decode:
                self._send(wire.SessionReady(self._hello.boot, self._scratch))
            self._out.append(Probe(not self._decode and self._settings.both_connect))
            self._enter(State.PROBE, now)

    def _try_up(self, now: float) -> None:
        if self._sent_probed and self._peer_probed:
            self._enter(State.UP, now)
            self.live_pairs = set(self._pairs)
            if self._cooldowns is not None:
                for pair in self._pairs:
                    self._cooldowns.back(pair, now)
            self._returns = NicReturns(
                token=self._session_token if self._offer is None else self._offer.token,
                nics=self._nics,
                remote=self._remote,
                cooldowns=self._cooldowns,
                attempt_s=self._settings.step_timeout_s,
                both_connect=self._settings.both_connect,
                left_out=self._left_out,
                emit=lambda effect: self._out.append(effect),
            )
            hello, agreement = self._peer.agreed()
            self._out.append(SessionUp(self._pairs, hello, agreement))
            if self._drain_wanted:
                self._send(wire.Drain())

    def _refuse(self, reasons: list[str], now: float) -> None:
        reasons = [wire.clip(reason) for reason in reasons[: wire.MAX_REASONS]]
        self._send(wire.Refuse(reasons))
        self._lose("; ".join(reasons), now, refused=True)

    def _lose(
        self,
        cause: str,
        now: float,
        *,
        say: bool = False,
        refused: bool = False,
        silent: bool = False,
    ) -> None:
        """The one way out. The fence comes first, before anyone hears of the loss."""
        assert self.state not in OVER
        cause = wire.clip(cause)
        if self._fabric_open:
            self._out.append(Fence())
        if self._returns is not None and self._cooldowns is not None:
            self._cooldowns.forgive(now - self._settings.link_lost_s)
        self._returns = None
        self.live_pairs = set()
        self._out.append(SessionLost(cause, refused, silent))
        if say:
            self._send(wire.Bye(cause))
        self._out.append(CloseTransport(cause))
        self._enter(State.FENCING, now)
        if not self._fabric_open:
            self._finish()

    def _finish(self) -> None:
        self.state = State.CLOSED
        self._out.append(Finished())
