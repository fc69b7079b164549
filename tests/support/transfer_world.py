"""Both messengers over links and a fabric that misbehave, driven by one seed.

One decode and one prefill node, real messengers with real pools, gates and slots. A step is one
thing that may happen: a frame or an event is delivered, a write lands, a pass ends, a client
leaves, a fault. Checks look from outside at pools, writes and frames, not at the machines.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdnode.config import PeerConfig
from pdnode.core import wire
from pdnode.core.geometry import KvGeometry
from pdnode.core.grant import GrantState
from pdnode.core.pages import PagePool
from pdnode.core.slots import SlotPool
from pdnode.core.transfer import FailCause
from pdnode.messenger.digests import PageVerifier
from pdnode.messenger.dispatch import DispatchLimits
from pdnode.messenger.gate import PageGate
from pdnode.messenger.groups import SourceGroup, SourceRegion
from pdnode.messenger.pull import Pull, PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.messenger.session import PeerSession
from pdnode.obs.records import Records
from pdnode.types import BootId, NodeId, Role, Run, SessionId, Verify, expand_runs
from tests.support.messenger_parts import HeldDigester
from tests.support.transfer_engine import Engine
from tests.support.transfer_fabric import Event, Fabric, Pair, Write

LAYERS = 2
PAGE_TOKENS = 4
FAULTS = ("write", "pair", "pair_back", "link", "engine", "cancel", "time")


class WatchedPool(PagePool):
    """A pool that says what it is about to take back."""

    def __init__(self, pages: int, watch: Callable[[set[int]], None]) -> None:
        super().__init__(pages)
        self._watch = watch

    def release(self, runs: tuple[Run, ...]) -> None:
        self._watch(set(expand_runs(runs)))
        super().release(runs)


@dataclass(slots=True, eq=False)
class _Outbox:
    frames: deque[wire.Frame]
    sent: Callable[[wire.Frame], None]

    def put(self, frame: wire.Frame) -> None:
        frame = wire.decode(wire.encode(frame))
        self.frames.append(frame)
        self.sent(frame)


@dataclass(slots=True, eq=False)
class _Session:
    """A link and its two ends. Frames sent before a loss may arrive until the receiver sees it."""

    number: SessionId
    decode: PeerSession
    prefill: PeerSession
    to_prefill: deque[wire.Frame]
    to_decode: deque[wire.Frame]
    decode_lost: bool = False
    prefill_lost: bool = False
    fenced: bool = False
    answered: set[Pair] = field(default_factory=set)  # NicFenced arrived: the pair may come back


class World:
    """`run` does it all; it raises AssertionError where a promise is broken."""

    def __init__(
        self,
        seed: int,
        *,
        requests: int,
        pairs: int,
        faults: Iterable[str],
        ranks: int,
        verify: Verify,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0
        self.to_start = requests
        self.pairs: tuple[Pair, ...] = tuple((10 + nic, 20 + nic) for nic in range(pairs))
        self.faults = set(faults)
        self.healing = False
        self.fabric = Fabric()
        self.fabric.sender.on_post = self.check_post
        self.fabric.target.on_land = self.check_land
        self.engine = Engine(PAGE_TOKENS, LAYERS)
        self.begun: list[Pull] = []
        self.entered: set[str] = set()
        self.landed: dict[str, set[tuple[int, int, int]]] = {}
        here = KvGeometry("gqa", LAYERS, 2, 8, PAGE_TOKENS, "float32", ranks, 8)
        there = KvGeometry("gqa", LAYERS, 2, 8, PAGE_TOKENS, "float32", 1, 6)
        self.geometry, self.prefill_geometry = here, there
        self.decode_pool = WatchedPool(here.pages, self.check_decode_release)
        self.prefill_pool = WatchedPool(there.pages, self.check_prefill_release)
        self.decode_gate = PageGate(self.decode_pool, max_quarantined=6)
        self.slots = SlotPool(5)
        peer = PeerConfig(verify=verify)
        here_digests, there_digests = HeldDigester(here), HeldDigester(there)
        self.digesters = (here_digests, there_digests)
        self.pulls = PullMessenger(
            boot=BootId("d"),
            geometry=here,
            fabric=self.fabric.target,
            gates=[self.decode_gate],
            slots=self.slots,
            peer=peer,
            drop_link=self.drop_decode,
            clock=lambda: self.now,
            verifier=PageVerifier(here_digests, [range(ranks)]),
        )
        self.pushes = PushMessenger(
            geometry=there,
            limits=DispatchLimits(vocabulary=100, context_tokens=64, max_waiting=16, verify=True),
            fabric=self.fabric.sender,
            groups=[
                SourceGroup(
                    PageGate(self.prefill_pool, max_quarantined=6),
                    self.engine,
                    (SourceRegion(0, 0),),
                )
            ],
            peer=peer,
            drop_link=self.drop_prefill,
            records=Records(),
            clock=lambda: self.now,
            digester=there_digests,
        )
        self.sessions: list[_Session] = []
        self.open_session()

    # running

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if not self.busy:
                break
            self.step(self.actions())
        self.healing = True
        for _ in range(4000):
            actions = self.actions()
            if actions:
                self.step(actions)
            elif self.busy:
                self.tick(1.0)
            else:
                break
        self.check_end()

    @property
    def busy(self) -> bool:
        return bool(self.to_start or self.pulls.open_pulls or self.pushes.open_pushes)

    def step(self, actions: list[tuple[int, Callable[[], None]]]) -> None:
        weights = [weight for weight, _ in actions]  # of faults 1, of all else 20 times as much
        self.rng.choices(actions, weights)[0][1]()
        self.check_entered()
        self.fabric.forget_old()

    def actions(self) -> list[tuple[int, Callable[[], None]]]:
        """(weight, what may happen next). While healing, nothing that is a fault."""
        found: list[tuple[int, Callable[[], None]]] = []
        sender, target = self.fabric.sender, self.fabric.target
        session = self.sessions[-1]
        if self.to_start and not session.decode_lost and len(self.begun) < 64:
            found.append((60, self.start))
        if session.decode_lost and session.prefill_lost and session.fenced:
            found.append((40, self.open_session))
        for one in self.sessions:
            found += self.session_actions(one)
        if sender.events:
            found.append((120, lambda: self.pushes.fabric_event(sender.events.popleft())))
        if target.events:
            found.append((120, self.target_event))
        if target.fences:
            found.append((60, self.fence_pair))
        found += [(40, digester.go) for digester in self.digesters if digester.jobs]
        found += self.engine_actions()
        found += self.write_actions()
        reading = [pull for pull in self.begun if pull.grant.reading]
        if reading:
            found.append((40, lambda: self.pulls.end(self.rng.choice(reading))))
        return found if self.healing else found + self.fault_actions()

    def session_actions(self, one: _Session) -> list[tuple[int, Callable[[], None]]]:
        found: list[tuple[int, Callable[[], None]]] = []
        if one.to_prefill and not one.prefill_lost:
            found.append((120, lambda: self.to_prefill(one)))
        if one.to_decode and not one.decode_lost:
            found.append((120, lambda: self.to_decode(one)))
        if one.decode_lost and not one.fenced:
            found.append((40, lambda: self.fence_session(one)))
        if one.decode_lost and not one.prefill_lost:
            found.append((20, lambda: self.lose_prefill(one)))
        if one.prefill_lost and not one.decode_lost:
            found.append((20, lambda: self.lose_decode(one, "gone")))
        return found

    def engine_actions(self) -> list[tuple[int, Callable[[], None]]]:
        engine = self.engine
        if engine.layers_left:
            return [(80, self.raise_layer)]
        if engine.flight:
            return [(80, engine.end_pass)]
        if engine.sequences:
            return [(80, lambda: engine.plan(self.rng, self.fabric.counter))]
        return []

    def write_actions(self) -> list[tuple[int, Callable[[], None]]]:
        sender, target = self.fabric.sender, self.fabric.target
        found: list[tuple[int, Callable[[], None]]] = []
        due = sender.due()
        if due:
            found.append((160, lambda: sender.post(self.rng.choice(due), self.rng.choice)))
        landing = self.fabric.may_land()
        if landing:
            found.append((120, lambda: target.land(self.rng.choice(landing))))
        uncounted = [one for one in self.fabric.all_connections if one.uncounted]
        if uncounted:
            found.append((120, lambda: target.count(self.rng.choice(uncounted))))
        done = [
            w for w in self.fabric.writes() if w.landed and not w.back and not w.connection.fails
        ]
        if done:
            found.append((120, lambda: sender.success(self.rng.choice(done))))
        lost = [w for w in self.fabric.writes() if not w.back and w.connection.fails]
        if lost:
            found.append((80, lambda: sender.error(self.rng.choice(lost))))
        return found

    def fault_actions(self) -> list[tuple[int, Callable[[], None]]]:
        found: list[tuple[int, Callable[[], None]]] = []
        session = self.sessions[-1]
        outstanding = [write for write in self.fabric.writes() if not write.back]
        if "write" in self.faults and outstanding:
            after = [write for write in outstanding if write.transfer.failed]
            chosen = self.rng.choice(after or outstanding)
            found.append((20 if after else 1, lambda: self.fabric.sender.error(chosen)))
            found.append((1, lambda: setattr(chosen.connection, "broken", True)))
        if "pair" in self.faults:
            found.append((1, lambda: self.break_pair(session)))
        if "pair_back" in self.faults and session.answered:
            found.append((1, lambda: self.pair_back(session)))
        if "link" in self.faults and not session.decode_lost:
            found.append((1, lambda: self.lose_decode(session, "lost")))
            found.append((1, lambda: self.lose_prefill(session)))
        if "engine" in self.faults:
            found.append((1, self.engine_dies))
        live = [pull for pull in self.begun if pull.grant.state is not GrantState.FREE]
        if "cancel" in self.faults and live:
            found.append((1, lambda: self.pulls.abandon(self.rng.choice(live))))
        dt = self.rng.choice((0.1, 3.0, 11.0)) if "time" in self.faults else 0.01
        found.append((5, lambda: self.tick(dt)))
        return found

    # what may happen

    def open_session(self) -> None:
        number = SessionId(len(self.sessions) + 1)
        to_prefill: deque[wire.Frame] = deque()
        to_decode: deque[wire.Frame] = deque()
        decode = self.end(number, Role.PREFILL, _Outbox(to_prefill, lambda frame: None))
        prefill = self.end(number, Role.DECODE, _Outbox(to_decode, self.check_said))
        for pair in self.pairs:
            self.fabric.connect(number, pair)
        self.sessions.append(_Session(number, decode, prefill, to_prefill, to_decode))

    def end(self, number: SessionId, peer_role: Role, outbox: _Outbox) -> PeerSession:
        prefill = peer_role is Role.PREFILL
        geometry = self.prefill_geometry if prefill else self.geometry
        return PeerSession(
            session=number,
            node=NodeId(peer_role),
            boot=BootId("p" if prefill else "d"),
            role=peer_role,
            hello=None,  # type: ignore[arg-type]  # the messengers do not look at it
            geometry=geometry,
            regions={},
            pairs=self.pairs if prefill else tuple((there, here) for here, there in self.pairs),
            outbox=outbox,
        )

    def session_of(self, end: PeerSession) -> _Session:
        return self.sessions[end.session - 1]

    def start(self) -> None:
        self.to_start -= 1
        tokens = self.rng.randint(2, 3 * PAGE_TOKENS + 1)

        def granted(pages: tuple[Run, ...]) -> None:
            session = self.sessions[-1]
            slot = None if session.decode_lost else self.slots.take()
            if slot is None:
                self.to_start += 1
                self.decode_gate.release(pages)
                return
            pull = self.pulls.begin(
                session.decode,
                request_id="r",
                prompt=tuple(range(tokens)),
                pages=pages,
                slot=slot,
                priority=0,
            )
            self.begun.append(pull)
            self.landed[pull.grant.key] = set()

        self.decode_gate.request(-(-(tokens + 1) // PAGE_TOKENS), granted)

    def to_prefill(self, one: _Session) -> None:
        frame = one.to_prefill.popleft()
        if isinstance(frame, wire.NicUp):
            self.fabric.connect(one.number, frame.pair)
            one.prefill.pairs = (*one.prefill.pairs, (frame.pair[1], frame.pair[0]))
            return
        if isinstance(frame, wire.NicFenced):
            one.answered.add(frame.pair)
        self.pushes.session_frame(one.prefill, frame)

    def to_decode(self, one: _Session) -> None:
        frame = one.to_decode.popleft()
        if isinstance(frame, wire.NicUp):
            one.decode.pairs = (*one.decode.pairs, frame.pair)
            one.to_prefill.append(frame)
            return
        self.pulls.session_frame(one.decode, frame)

    def pair_back(self, one: _Session) -> None:
        """The prefill offers the pair again; the decode node answers behind its regrants."""
        pair = self.rng.choice(sorted(one.answered))
        one.answered.discard(pair)
        nic = wire.NicAddress(pair[1], "nic", b"")
        one.to_decode.append(wire.NicUp(pair, nic, bytes(wire.SESSION_TOKEN_BYTES), []))

    def drop_decode(self, end: PeerSession, text: str) -> None:
        self.check_dropped(text)
        self.lose_decode(self.session_of(end), text)

    def drop_prefill(self, end: PeerSession, text: str) -> None:
        self.check_dropped(text)
        self.lose_prefill(self.session_of(end))

    def lose_decode(self, one: _Session, text: str) -> None:
        if not one.decode_lost:
            one.decode_lost = True
            one.decode.up = False
            self.pulls.session_lost(one.decode, text)

    def lose_prefill(self, one: _Session) -> None:
        if not one.prefill_lost:
            one.prefill_lost = True
            one.prefill.up = False
            self.fabric.sender.fence(one.number)
            self.pushes.session_lost(one.prefill)

    def fence_session(self, one: _Session) -> None:
        for connection in self.fabric.all_connections:
            if connection.session == one.number:
                self.fabric.target.close(connection)
        one.fenced = True
        self.pulls.session_fenced(one.decode)

    def fence_pair(self) -> None:
        number, pair = self.fabric.target.fences.pop(0)
        self.fabric.target.close(self.fabric.connections[number, pair])
        self.fabric.target.events.append(Event("fenced", session=number, pair=pair))

    def target_event(self) -> None:
        event = self.fabric.target.events.popleft()
        if event.kind != "fenced":
            self.pulls.fabric_event(event)
            return
        one = self.sessions[event.session - 1]
        if not one.decode_lost:  # the link is told first, as peer_link does it
            one.decode.pairs = tuple(pair for pair in one.decode.pairs if pair != event.pair)
            self.pulls.pair_fenced(one.decode, event.pair)

    def break_pair(self, one: _Session) -> None:
        """A connection dies; either end, or both in any order, may see it."""
        pair = self.rng.choice(self.pairs)
        turned = (pair[1], pair[0])
        sides = self.rng.choice(("decode", "prefill", "both"))
        if sides != "prefill" and pair in one.decode.pairs and not one.decode_lost:
            one.decode.pairs = tuple(other for other in one.decode.pairs if other != pair)
            self.pulls.pair_lost(one.decode, pair, "died")
        if sides != "decode" and turned in one.prefill.pairs and not one.prefill_lost:
            one.prefill.pairs = tuple(other for other in one.prefill.pairs if other != turned)
            self.pushes.pair_lost(one.prefill, turned, "died")

    def raise_layer(self) -> None:
        self.fabric.counter += 1
        self.engine.layers_left -= 1

    def engine_dies(self) -> None:
        self.fabric.counter += self.engine.layers_left  # the new worker's counter goes on from here
        self.engine.layers_left = 0
        self.engine.flight.clear()
        self.pushes.engine_failed("worker died")

    def tick(self, dt: float) -> None:
        self.now += dt
        self.pulls.tick()
        self.pushes.tick()

    # what must hold

    def pull_of(self, write: Write) -> Pull | None:
        immediate = write.transfer.immediate
        for pull in self.begun:
            open_slots = pull.grant.state is not GrantState.FREE
            if open_slots and any(slot.immediate == immediate for slot in pull.grant.slots):
                return pull
        return None

    def check_post(self, write: Write) -> None:
        if write.connection.target_open:
            self.check_land(write, posted=True)

    def check_land(self, write: Write, posted: bool = False) -> None:
        pull = self.pull_of(write)
        assert pull is not None, "a write after its pages were freed"
        assert write.cell[1] in expand_runs(pull.pages), "a write into pages of another request"
        assert pull.grant.state is not GrantState.COMPLETE, "a write after the pages were read"
        if not posted:
            self.landed[pull.grant.key].add(write.cell)

    def check_entered(self) -> None:
        for pull in self.begun:
            key = pull.grant.key
            if pull.grant.state is not GrantState.COMPLETE or key in self.entered:
                continue
            self.entered.add(key)
            sent = expand_runs(pull.pages)[: -(-pull.tokens // PAGE_TOKENS)]
            wanted = {
                (rank, page, layer)
                for rank in range(self.geometry.tp)
                for page in sent
                for layer in range(LAYERS)
            }
            assert self.landed[key] == wanted, "pages read before all writes landed"
            late = [w for w in self.fabric.may_land() if self.pull_of(w) is pull]
            assert not late, "pages read while writes may still land"

    def check_said(self, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Drained):
            late = [w for w in self.fabric.may_land() if self.is_of(w, frame.key)]
            assert not late, "drained was said while writes may land"

    def is_of(self, write: Write, key: str) -> bool:
        pull = self.pull_of(write)
        return pull is not None and pull.grant.key == key

    def check_decode_release(self, pages: set[int]) -> None:
        late = [write for write in self.fabric.may_land() if write.cell[1] in pages]
        assert not late, "pages freed while writes may land in them"
        readers = [p for p in self.begun if p.grant.reading and pages & set(expand_runs(p.pages))]
        assert not readers, "pages freed while they are read"

    def check_prefill_release(self, pages: set[int]) -> None:
        reading = [w for w in self.fabric.writes() if not w.back and w.source in pages]
        assert not reading, "source pages freed while a write reads them"
        computing = [seq for seq, _ in self.engine.flight if seq.pages & pages]
        assert not computing, "source pages freed while a pass computes into them"

    def check_dropped(self, text: str) -> None:
        """Deadlines are the last resort: where time does not jump, nobody owes an answer."""
        if "time" not in self.faults:
            assert text == "no connection is left", text

    def check_outcomes(self) -> None:
        for pull in self.begun:
            assert pull.outcome.done(), "a request never ended"
            if pull.outcome.cancelled() or "time" in self.faults:
                continue
            cause = pull.outcome.result().cause
            assert cause is not FailCause.STALLED
            if cause is FailCause.SHORT:  # landed, and its immediate dropped by the fence
                dropped = self.fabric.target.dropped
                assert any(slot.immediate in dropped for slot in pull.grant.slots)

    def check_end(self) -> None:
        assert not self.to_start, "a request never began"
        self.check_outcomes()
        assert (self.pulls.open_pulls, self.pushes.open_pushes) == (0, 0)
        assert self.decode_pool.counts.free == self.geometry.pages
        assert self.prefill_pool.counts.free == self.prefill_geometry.pages
        assert (self.slots.taken, self.fabric.target.counters) == (0, {})
        assert not self.fabric.transfers
        assert not self.engine.sequences
