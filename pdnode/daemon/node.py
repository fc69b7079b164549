"""The node: builds every part for its role, joins them, and takes them down in order.

Order of life: listeners (so that probes answer) → transfer core → worker → messenger and peer
links → serving → draining → everything closed, links before the core, the core before the worker.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from itertools import chain
from typing import Any

from pdnode import __version__
from pdnode.api.admin import build_admin_app, listen_admin
from pdnode.api.app import build_app
from pdnode.api.listener import ApiListener
from pdnode.api.peer import PeerDialer, PeerListener
from pdnode.config import Config
from pdnode.core.heartbeat import Counters
from pdnode.core.hello import wire_geometry
from pdnode.core.slots import SlotPool
from pdnode.core.wire import PROTOCOL_MAX, PROTOCOL_MIN, Hello
from pdnode.daemon.collector import calm_collector
from pdnode.daemon.control import Control
from pdnode.daemon.engine import Engine, start_engine
from pdnode.daemon.observe import Observation
from pdnode.daemon.peering import Peering
from pdnode.daemon.placement import choose_threads
from pdnode.daemon.reload import ConfigSource
from pdnode.daemon.service import NodeService
from pdnode.daemon.transfer import Transfer, open_transfer
from pdnode.daemon.verification import Verification
from pdnode.engine.protocol import Loading
from pdnode.errors import ConfigError, EngineDied, Exit, Problem, Unavailable
from pdnode.messenger.digests import Digester, PageVerifier
from pdnode.messenger.dispatch import DispatchLimits
from pdnode.messenger.groups import SourceGroup, SourceRegion
from pdnode.messenger.peer_link import Identity
from pdnode.messenger.peers import SESSION_EVENTS, PeerManager
from pdnode.messenger.pull import PullMessenger
from pdnode.messenger.push import PushMessenger
from pdnode.messenger.session import PeerSession
from pdnode.messenger.stall import StallWatch
from pdnode.models.config import load_config
from pdnode.models.fingerprint import fingerprint
from pdnode.models.tokenizer import Tokenizer
from pdnode.obs.log import event
from pdnode.obs.records import Records
from pdnode.types import BootId, Role, SessionId

TICK_S = 0.25
DRAIN_POLL_S = 0.05
_log = logging.getLogger(__name__)


def serve(config: Config, source: ConfigSource) -> int:
    """Run this node until a signal ends it; the exit code. `source` is what a reload reads."""
    return asyncio.run(Node(config, source).run())


class Node:
    """One daemon. `run` is called once."""

    def __init__(self, config: Config, source: ConfigSource) -> None:
        self._config = config
        self._source = source
        self._boot = BootId(os.urandom(16).hex())
        self._model = load_config(config.model.path)
        if problems := self._model.tp_problems(config.engine.tp):
            raise ConfigError(problems)
        self._tokenizer = Tokenizer.load(config.model.path)
        self._records = Records()
        self._stop = asyncio.Event()
        self._signals = 0
        self._died: str | None = None
        self._engine: Engine | None = None
        self._transfer: Transfer | None = None
        self._peers: PeerManager | None = None
        self._pull: PullMessenger | None = None
        self._push: PushMessenger | None = None
        self._stalls = StallWatch(config.peer.stall_s)
        self._service = NodeService(
            role=config.node.role,
            policy=config.node.when_no_prefill,
            model_name=config.model.name,
            context_tokens=self._model.context_tokens,
            vocabulary=self._model.vocabulary,
            max_waiting=config.engine.max_waiting,
            records=self._records,
            clock=time.monotonic,
        )
        self._observed = Observation(config, self._service, self._records, boot=self._boot)
        self._figures = self._observed.parts
        self._control: Control | None = None

    async def run(self) -> int:
        asyncio.get_running_loop().set_exception_handler(self._on_fault)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        async with contextlib.AsyncExitStack() as stack:
            await self._listen(stack)
            if await self._unless_stopped(self._load(stack)):
                code = await self._serve()
            else:  # stopped while loading: there is nothing to drain
                code = Exit.OK if self._died is None else Exit.INTERNAL
        event(_log, logging.INFO, "node.stopped", "stopped", exit_code=int(code))
        return code

    async def _serve(self) -> int:
        """From loaded to drained; the exit code."""
        calm_collector()
        event(
            _log, logging.INFO, "node.serving", "serving",
            role=self._config.node.role, model=self._config.model.name,
        )  # fmt: skip
        background = [
            asyncio.create_task(self._run_steps()),
            asyncio.create_task(self._tick()),
            asyncio.create_task(self._observed.watch.run()),
        ]
        await self._stop.wait()
        code = await self._drain()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        return code

    # building

    async def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        """The API and admin listeners. ConfigError if an address cannot be bound."""
        config = self._config
        observed = self._observed
        observed.keep_events()
        stack.callback(observed.close)
        app = build_app(
            self._service,
            self._tokenizer,
            config.api,
            observed.metrics,
            warnings=observed.warnings.current,
        )
        listener = ApiListener(app, config.api)
        try:
            host, port = await listener.start()
        except OSError as error:
            where = f"{config.api.host}:{config.api.port}"
            raise ConfigError([Problem("api.listen", f"{where}: {error.strerror}")]) from error
        stack.push_async_callback(listener.stop)
        try:
            self._control = control = observed.control(self._source, app, listener)
            admin_app = build_admin_app(control, self._records, observed.events)
            admin = await listen_admin(admin_app, config.node.admin_socket)
        except OSError as error:
            where = str(config.node.admin_socket)
            problem = Problem("node.admin_socket", f"{where}: {error.strerror}")
            raise ConfigError([problem]) from error
        stack.callback(config.node.admin_socket.unlink, missing_ok=True)
        stack.push_async_callback(admin.cleanup)
        event(_log, logging.INFO, "api.listening", "API listens", host=host, port=port)

    async def _load(self, stack: contextlib.AsyncExitStack) -> None:
        """Transfer core, worker, messenger: everything that stands on the model."""
        config = self._config
        model_print = await asyncio.to_thread(fingerprint, config.model.path)
        threads = await asyncio.to_thread(choose_threads, config)
        wake_fds = []
        if config.node.role is not Role.COLOCATED:
            self._service.loading = "opening the NICs"
            transfer = await asyncio.to_thread(open_transfer, config, cpu=threads.progress)
            self._transfer = self._figures.transfer = transfer
            stack.callback(transfer.engine.close)
            transfer.engine.start(asyncio.get_running_loop())
            wake_fds = [transfer.wake_fd]
        engine = await start_engine(config, wake_fds, self._on_loading, cpus=threads.worker)
        stack.push_async_callback(engine.close)
        self._engine = self._figures.engine = engine
        if self._transfer is not None:
            await self._join(self._transfer, engine, model_print, stack)
        self._service.start(groups=engine.groups, peers=self._peers, pulls=self._pull)

    def _on_loading(self, loading: Loading) -> None:
        self._service.loading = f"{loading.what} {loading.ratio:.0%}"

    async def _join(
        self,
        transfer: Transfer,
        engine: Engine,
        model_print: str,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        """Messenger and peer links over the workers' memory."""
        config = self._config
        regions = [transfer.add_memory(one.worker, engine.geometry) for one in engine.groups]
        verification = Verification(
            transfer.fabric,
            engine.geometry,
            [[rank.region for rank in ranks] for ranks in regions],
        )
        stack.callback(verification.close)
        for group, ranks in zip(engine.groups, regions, strict=True):
            for rank, fd in zip(ranks, group.worker.region_fds, strict=True):
                await verification.watch(rank.region, fd, group.gate.pool.withheld)
        boot = self._boot
        hello = self._hello(boot, engine, transfer, model_print)
        peering = Peering(
            self._make_push(transfer, engine, regions, verification.digester)
            if config.node.role is Role.PREFILL
            else self._make_pull(transfer, engine, boot, verification.verifier)
        )
        self._figures.peering = peering
        dialer = PeerDialer(config.peer)
        stack.push_async_callback(dialer.close)
        self._peers = PeerManager(
            config,
            Identity(hello, transfer.nics, self._writable(regions)),
            transfer.fabric,
            peering,
            dial=dialer.dial,
            counters=self._counters,
        )
        self._figures.peers = self._peers
        transfer.engine.on(SESSION_EVENTS, self._peers.fabric_event)
        if config.node.role is Role.PREFILL:
            await self._accept_peers(self._peers, stack)
        stack.push_async_callback(self._peers.close)  # before the listener stops
        self._peers.start()

    def _writable(self, regions: Sequence[tuple[SourceRegion, ...]]) -> dict[int, int]:
        """What peers write to, on a decode node: the ranks are numbered group by group."""
        if self._config.node.role is Role.PREFILL:
            return {}
        return {rank: one.region for rank, one in enumerate(chain.from_iterable(regions))}

    async def _accept_peers(self, peers: PeerManager, stack: contextlib.AsyncExitStack) -> None:
        listener = PeerListener(self._config.peer, peers.accept)
        try:
            host, port = await listener.start()
        except OSError as error:
            where = f"{self._config.peer.host}:{self._config.peer.port}"
            raise ConfigError([Problem("peer.listen", f"{where}: {error.strerror}")]) from error
        stack.push_async_callback(listener.stop)
        event(_log, logging.INFO, "peer.listening", "peer link listens", host=host, port=port)

    def _make_push(
        self,
        transfer: Transfer,
        engine: Engine,
        regions: Sequence[tuple[SourceRegion, ...]],
        digester: Digester,
    ) -> PushMessenger:
        limits = DispatchLimits(
            vocabulary=self._model.vocabulary,
            context_tokens=self._model.context_tokens,
            max_waiting=self._config.engine.max_waiting,
            verify=True,
        )
        self._push = PushMessenger(
            geometry=engine.geometry,
            limits=limits,
            fabric=transfer.fabric,
            groups=[
                SourceGroup(group.gate, group.steps, ranks)
                for group, ranks in zip(engine.groups, regions, strict=True)
            ],
            peer=self._config.peer,
            drop_link=self._drop_link,
            records=self._records,
            clock=time.monotonic,
            digester=digester,
        )
        transfer.engine.on(frozenset({"drained", "failed", "settled"}), self._push.fabric_event)
        self._figures.push = self._push
        return self._push

    def _make_pull(
        self, transfer: Transfer, engine: Engine, boot: BootId, verifier: PageVerifier
    ) -> PullMessenger:
        self._pull = PullMessenger(
            boot=boot,
            geometry=engine.geometry,
            fabric=transfer.fabric,
            gates=[group.gate for group in engine.groups],
            slots=SlotPool(),
            peer=self._config.peer,
            drop_link=self._drop_link,
            clock=time.monotonic,
            verifier=verifier,
        )
        self._figures.verifier = verifier
        self._observed.warnings.add_source(verifier.conditions)
        transfer.engine.on(frozenset({"reached", "overshoot"}), self._pull.fabric_event)
        self._figures.pull = self._pull
        return self._pull

    def _hello(self, boot: BootId, engine: Engine, transfer: Transfer, model_print: str) -> Hello:
        config = self._config
        return Hello(
            node=config.node.id,
            boot=boot,
            role=config.node.role,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            pdnode_version=__version__,
            model=config.model.name,
            fingerprint=model_print,
            geometry=wire_geometry(engine.geometry, len(engine.groups)),
            context_tokens=self._model.context_tokens,
            provider=config.fabric.provider,
            libfabric=transfer.fabric.library_version,
        )

    def _drop_link(self, session: PeerSession, text: str) -> None:
        assert self._peers is not None
        self._peers.drop(session, text)

    def _counters(self) -> Counters:
        engine, transfer = self._engine, self._transfer
        assert engine is not None
        assert transfer is not None
        return Counters(
            steps=engine.figures.steps,
            step_busy=engine.busy,
            core=transfer.fabric.statistics()["turns"],
            waiting_tokens=engine.waiting_tokens(),
            free_pages=engine.page_counts.free,
        )

    # running

    async def _unless_stopped(self, work: Coroutine[None, None, None]) -> bool:
        """Runs `work`; False if a signal came first, then `work` is cancelled."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            return False
        stop.cancel()
        await task
        return True

    def _signalled(self) -> None:
        self._signals += 1
        self._stop.set()

    async def _run_steps(self) -> None:
        """The groups' step loops. A worker that dies ends every request and then the node."""
        assert self._engine is not None
        groups = self._engine.groups
        running = [asyncio.create_task(group.steps.run()) for group in groups]
        died = [group.worker.died for group in groups]
        ends: list[asyncio.Future[Any]] = [*running, *died]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for one in died:
                if one.done():
                    raise one.result()
            for loop in running:
                if loop.done():
                    loop.result()
        except Exception as error:  # noqa: BLE001 - whatever it is, requests must hear of it
            if not isinstance(error, EngineDied):
                _log.exception("the step loop failed")
            self._engine_died(str(error))
        finally:
            for loop in running:
                loop.cancel()

    def _engine_died(self, text: str) -> None:
        if self._died is not None:
            return
        self._died = text
        event(_log, logging.ERROR, "engine.died", "this node cannot go on", cause=text)
        self._service.engine_died(text)
        if self._push is not None:
            self._push.engine_failed(text)
        self._stop.set()

    def _on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody took. A broken assertion means that some state is wrong: pages
        may be held for ever or given away too early, so the node ends and says why."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, AssertionError):
            self._engine_died(f"internal error: {str(error) or context['message']}")

    async def _tick(self) -> None:
        """Deadlines of transfers. Nobody awaits this task before the end, so it reports itself."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self._pull is not None:
                    self._pull.tick()
                if self._push is not None:
                    self._push.tick()
                    self._look_for_stalls(self._push)
            except Exception as error:  # noqa: BLE001 - the next tick may still do its work
                context = {"message": "a tick failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def _look_for_stalls(self, push: PushMessenger) -> None:
        """A connection that takes writes and completes none is lost, whatever the provider says."""
        assert self._transfer is not None
        assert self._peers is not None
        rows = self._transfer.fabric.peer_statistics()
        sessions = {session.session: session for session in self._peers.sessions()}
        for number, pair in self._stalls.check(rows, time.monotonic()):
            session = sessions.get(SessionId(number))
            if session is not None:
                cause = f"no progress for {self._stalls.stall_s:g} s"
                event(
                    _log, logging.WARNING, "nic.stalled", "connection stalled",
                    peer=session.node, nic=pair[0], cause=cause,
                )  # fmt: skip
                push.pair_lost(session, pair, cause)

    # stopping

    async def _drain(self) -> int:
        """Finish what was accepted, within the bound or until a second signal; the exit code."""
        assert self._control is not None
        self._control.stopping = True
        self._control.set_draining(True)
        if self._died is not None:
            return Exit.INTERNAL
        event(_log, logging.INFO, "node.draining", "draining", requests=self._open_work())
        deadline = time.monotonic() + self._figures.config.node.shutdown_timeout_s
        while self._open_work():
            if self._signals > 1 or time.monotonic() > deadline:
                self._service.fail_all(Unavailable("this node is shutting down"))
                if self._push is not None:
                    self._push.engine_failed("this node is shutting down")
                return Exit.FORCED
            await asyncio.sleep(DRAIN_POLL_S)
        return Exit.OK

    def _open_work(self) -> int:
        """Requests, and transfers that still owe or are owed a `drained`."""
        push = 0 if self._push is None else self._push.open_pushes
        pull = 0 if self._pull is None else self._pull.open_pulls
        return self._service.open_requests + push + pull
