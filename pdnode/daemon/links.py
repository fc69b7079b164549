"""The messenger and the peer links of one role over one engine: they come and go together."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from itertools import chain

from pdnode import __version__
from pdnode.api.peer import PeerDialer, PeerListener
from pdnode.core.heartbeat import Counters
from pdnode.core.hello import wire_geometry
from pdnode.core.slots import SlotPool
from pdnode.core.wire import PROTOCOL_MAX, PROTOCOL_MIN, Hello
from pdnode.daemon.engine import Engine
from pdnode.daemon.fabrictest import FabricTest
from pdnode.daemon.figures import Figures
from pdnode.daemon.peering import Peering
from pdnode.daemon.transfer import Transfer
from pdnode.daemon.verification import Verification
from pdnode.errors import ConfigError, Problem
from pdnode.messenger.digests import Digester, PageVerifier
from pdnode.messenger.dispatch import DispatchLimits
from pdnode.messenger.fabrictest import TestReceiver, TestSender
from pdnode.messenger.groups import SourceGroup, SourceRegion
from pdnode.messenger.peer_link import Identity
from pdnode.messenger.peers import SESSION_EVENTS, PeerManager
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.messenger.session import PeerSession
from pdnode.messenger.stall import StallWatch
from pdnode.models.config import ModelConfig
from pdnode.obs.faults import report
from pdnode.obs.log import event
from pdnode.obs.records import Records
from pdnode.topology.nicfacts import mtu_of
from pdnode.topology.sysfs import Sysfs
from pdnode.types import RegionKind, Role, SessionId

TICK_S = 0.25
_log = logging.getLogger(__name__)


class Links:
    """Call `open` once, then `tick` until `stack` is closed. What is up stands in `parts`."""

    def __init__(
        self,
        parts: Figures,
        engine: Engine,
        transfer: Transfer,
        regions: Sequence[tuple[SourceRegion, ...]],
        *,
        model: ModelConfig,
        fingerprint: str,
        records: Records,
    ) -> None:
        self._parts = parts
        self._config = parts.config
        self._engine = engine
        self._transfer = transfer
        self._regions = regions
        self._model = model
        self._fingerprint = fingerprint
        self._records = records
        self._stalls = StallWatch(parts.config.peer.stall_s)

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """ConfigError or DeviceMissing if an address cannot be bound."""
        config, transfer = self._config, self._transfer
        stack.callback(self._forget)
        await asyncio.to_thread(transfer.take_role, config)
        verification = await self._verification(stack)
        prefill = config.node.role is Role.PREFILL
        if prefill:
            push = self._make_push(verification.digester)
            peering = Peering(push, self._make_sender(push))
        else:
            pull = self._make_pull(verification.verifier)
            peering = Peering(pull, self._make_receiver(pull))
        self._parts.peering = peering
        dialer = PeerDialer(config.peer)
        stack.push_async_callback(dialer.close)
        peers = PeerManager(
            config,
            Identity(
                self._hello(),
                transfer.nics,
                {} if prefill else self._writable(),
                transfer.devices,
                dict(enumerate(transfer.homes)),
            ),
            transfer.fabric,
            peering,
            dial=dialer.dial,
            counters=self._counters,
        )
        self._parts.peers = peers
        transfer.engine.on(SESSION_EVENTS, peers.fabric_event)
        self._parts.reload_links = dialer.reload
        if prefill:
            await self._accept_peers(peers, stack)
        stack.push_async_callback(peers.close)  # before the listener stops
        peers.start()

    async def _verification(self, stack: contextlib.AsyncExitStack) -> Verification:
        """Watches the canaries from now on; nobody can write to the memory yet."""
        engine = self._engine
        numbers = [[rank.region for rank in ranks] for ranks in self._regions]
        verification = Verification(self._transfer.fabric, engine.geometry, numbers)
        stack.callback(verification.close)
        for group, ranks in zip(engine.groups, self._regions, strict=True):
            for rank, fd in zip(ranks, group.worker.region_fds, strict=True):
                await verification.watch(rank.region, fd, group.gate.pool.withheld)
        return verification

    def _writable(self) -> dict[int, int]:
        """What peers write to, on a decode node: the ranks are numbered group by group."""
        return {rank: one.region for rank, one in enumerate(chain.from_iterable(self._regions))}

    def _forget(self) -> None:
        """All is closed, all peers are fenced."""
        self._transfer.engine.clear()
        self._parts.reload_links = self._parts.fabric_test = None
        self._parts.peers = self._parts.push = self._parts.pull = self._parts.verifier = None

    async def _accept_peers(self, peers: PeerManager, stack: contextlib.AsyncExitStack) -> None:
        listener = PeerListener(self._config.peer, peers.accept)
        try:
            host, port = await listener.start()
        except OSError as error:
            where = f"{self._config.peer.host}:{self._config.peer.port}"
            raise ConfigError([Problem("peer.listen", f"{where}: {error.strerror}")]) from error
        self._parts.reload_links = listener.reload
        stack.push_async_callback(listener.stop)
        event(_log, logging.INFO, "peer.listening", "peer link listens", host=host, port=port)

    def _make_push(self, digester: Digester) -> PushMessenger:
        limits = DispatchLimits(
            vocabulary=self._model.vocabulary,
            context_tokens=self._model.context_tokens,
            max_waiting=self._config.engine.max_waiting,
            verify=self._transfer.region.kind is not RegionKind.CUMEM,
        )
        push = PushMessenger(
            geometry=self._engine.geometry,
            limits=limits,
            fabric=self._transfer.fabric,
            groups=[
                SourceGroup(group.gate, group.steps, ranks)
                for group, ranks in zip(self._engine.groups, self._regions, strict=True)
            ],
            peer=self._config.peer,
            drop_link=self._drop_link,
            records=self._records,
            clock=time.monotonic,
            digester=digester,
            devices=self._transfer.devices,
        )
        self._transfer.engine.on(frozenset({"drained", "failed", "settled"}), push.fabric_event)
        self._parts.push = push
        return push

    def _make_pull(self, verifier: PageVerifier) -> PullMessenger:
        pull = PullMessenger(
            boot=self._parts.boot,
            geometry=self._engine.geometry,
            fabric=self._transfer.fabric,
            gates=[group.gate for group in self._engine.groups],
            slots=SlotPool(),
            peer=self._config.peer,
            drop_link=self._drop_link,
            clock=time.monotonic,
            verifier=verifier,
        )
        self._transfer.engine.on(frozenset({"reached", "overshoot"}), pull.fabric_event)
        self._parts.pull, self._parts.verifier = pull, verifier
        return pull

    def _make_sender(self, push: PushMessenger) -> TestSender:
        """For `pdnode fabric-test`, over the memory of the first rank."""
        nics = self._transfer.nics
        sender = TestSender(
            fabric=self._transfer.fabric,
            gate=self._engine.groups[0].gate,
            region=self._regions[0][0].region,
            geometry=self._engine.geometry,
            next_transfer=push.next_transfer,
            mtu_of=lambda nic: mtu_of(Sysfs(), nics[nic].name),
            devices=self._transfer.devices,
        )
        self._transfer.engine.on(frozenset({"drained", "failed", "settled"}), sender.fabric_event)
        return sender

    def _make_receiver(self, pull: PullMessenger) -> TestReceiver:
        transfer = self._transfer
        receiver = TestReceiver(
            fabric=transfer.fabric,
            gates=[group.gate for group in self._engine.groups],
            pulls=pull,
            tp=self._engine.geometry.tp,
            rank_of=transfer.rank_of,
        )
        transfer.engine.on(frozenset({"reached", "overshoot"}), receiver.fabric_event)
        page_bytes = self._engine.geometry.page_bytes
        self._parts.fabric_test = FabricTest(self._config, transfer, receiver, page_bytes)
        return receiver

    def _hello(self) -> Hello:
        config = self._config
        return Hello(
            node=config.node.id,
            boot=self._parts.boot,
            role=config.node.role,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            pdnode_version=__version__,
            model=config.model.name,
            fingerprint=self._fingerprint,
            geometry=wire_geometry(self._engine.geometry, len(self._engine.groups)),
            context_tokens=self._model.context_tokens,
            provider=config.fabric.provider,
            libfabric=self._transfer.fabric.library_version,
        )

    def _drop_link(self, session: PeerSession, text: str) -> None:
        assert self._parts.peers is not None
        self._parts.peers.drop(session, text)

    def _counters(self) -> Counters:
        engine = self._engine
        return Counters(
            steps=engine.figures.steps,
            step_busy=engine.busy,
            core=self._transfer.fabric.statistics()["turns"],
            waiting_tokens=engine.waiting_tokens(),
            free_pages=engine.page_counts.free,
        )

    async def tick(self) -> None:
        """Deadlines of transfers. Nobody awaits this task before the end, so it reports itself."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self._parts.pull is not None:
                    self._parts.pull.tick()
                if self._parts.push is not None:
                    self._parts.push.tick()
                    self._look_for_stalls(self._parts.push)
            except Exception as error:  # noqa: BLE001 - the next tick may still do its work
                report(error, "a tick failed")

    def _look_for_stalls(self, push: PushMessenger) -> None:
        """A connection that takes writes and completes none is lost, whatever the provider says."""
        assert self._parts.peers is not None
        rows = self._transfer.fabric.peer_statistics()
        sessions = {session.session: session for session in self._parts.peers.sessions()}
        for number, pair in self._stalls.check(rows, time.monotonic()):
            session = sessions.get(SessionId(number))
            if session is not None:
                cause = f"no progress for {self._stalls.stall_s:g} s"
                event(
                    _log, logging.WARNING, "nic.stalled", "connection stalled",
                    peer=session.node, nic=pair[0], cause=cause,
                )  # fmt: skip
                push.pair_lost(session, pair, cause)
