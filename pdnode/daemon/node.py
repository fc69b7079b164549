"""The node: builds every part for its role, joins them, and takes them down in order.

Order of life: listeners (so that probes answer) → transfer core → worker → messenger and peer
links → serving → draining → everything closed, links before the worker, the worker before the core.
Listeners live as long as the process. Core and worker are one engine: when it dies everything that
stands on it is closed and made anew, with a new boot id. Messenger and links go with a role.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import time
from collections.abc import Coroutine
from typing import Any

from pdnode.api.admin import build_admin_app, listen_admin
from pdnode.api.admin_actions import ActionRefused, Reload
from pdnode.api.app import build_app
from pdnode.api.listener import ApiListener
from pdnode.config import Config
from pdnode.daemon.collector import calm_collector
from pdnode.daemon.control import Control
from pdnode.daemon.engine import start_engine
from pdnode.daemon.hostview import HostView
from pdnode.daemon.kvregion import choose_region
from pdnode.daemon.lifecycle import Lifecycle, Phase, Restarts
from pdnode.daemon.links import Links
from pdnode.daemon.notify import Notifier
from pdnode.daemon.observe import Observation
from pdnode.daemon.passwatch import PassWatch
from pdnode.daemon.placement import choose_places
from pdnode.daemon.reload import ConfigSource
from pdnode.daemon.rolechange import DRAIN_POLL_S, RoleChange
from pdnode.daemon.service import NodeService
from pdnode.daemon.supervise import Supervisor
from pdnode.daemon.transfer import open_transfer
from pdnode.engine.protocol import Loading
from pdnode.errors import ConfigError, DeviceMissing, EngineDied, Exit, Problem, Unavailable
from pdnode.messenger.groups import SourceRegion
from pdnode.models.config import load_config
from pdnode.models.fingerprint import fingerprint
from pdnode.models.tokenizer import Tokenizer
from pdnode.obs.log import event
from pdnode.obs.records import Records
from pdnode.types import BootId, Role

_log = logging.getLogger(__name__)


def serve(config: Config, source: ConfigSource) -> int:
    """Run this node until a signal ends it; the exit code. `source` is what a reload reads."""
    faulthandler.enable()  # SIGABRT of a watchdog leaves the stacks of all threads in the log
    return asyncio.run(Node(config, source).run())


class Node:
    """One daemon. `run` is called once."""

    def __init__(self, config: Config, source: ConfigSource) -> None:
        self._base = config  # with the NICs as they were found
        self._source = source
        self._model = load_config(config.model.path)
        if problems := self._model.tp_problems(config.engine.tp):
            raise ConfigError(problems)
        self._tokenizer = Tokenizer.load(config.model.path)
        self._records = Records()
        self._life = Lifecycle(Restarts(config.engine.max_restarts))
        self._reloads: set[asyncio.Task[None]] = set()
        self._regions: list[tuple[SourceRegion, ...]] = []  # of the engine, by group and rank
        self._fingerprint = ""
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
        self._observed = Observation(config, self._service, self._records, boot=_new_boot())
        self._parts = self._observed.parts
        self._control: Control | None = None
        self._role_change: RoleChange | None = None

    @property
    def _config(self) -> Config:
        """What is in effect: a reload or a change of role makes another one."""
        return self._parts.config

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_fault)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._life.signalled)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        async with contextlib.AsyncExitStack() as stack:
            await self._listen(stack)
            self._supervise(stack)
            code = await self._serve_engines()
            self._life.enter(Phase.STOPPED)
        event(_log, logging.INFO, "node.stopped", "stopped", exit_code=int(code))
        return code

    async def _serve_engines(self) -> int:
        """One engine after the other; the exit code."""
        life = self._life
        while True:
            async with contextlib.AsyncExitStack() as stack:
                code = await self._serve_engine(stack)
            if code is None and life.died is not None and not await self._wait_to_restart():
                code = Exit.OK
            if code is not None:
                return Exit.INTERNAL if life.fatal else code
            self._parts.boot = _new_boot()

    async def _serve_engine(self, stack: contextlib.AsyncExitStack) -> int | None:
        """Load, and serve in one role after the other; None if another engine is to follow."""
        life, role = self._life, self._config.node.role
        assert self._role_change is not None
        try:
            if not await self._unless_stopped(self._load(stack)):  # there is nothing to drain
                return Exit.OK
        except EngineDied as error:
            if life.phase is Phase.STARTING:
                raise
            self._engine_died(str(error))
            return None
        except (ConfigError, DeviceMissing) as error:
            if not self._role_change.take_back(str(error)):
                raise
            return None
        while _same_engine(role, self._config.node.role):
            async with contextlib.AsyncExitStack() as links_stack:
                try:
                    links = await self._open_links(links_stack)
                except (ConfigError, DeviceMissing) as error:
                    if not self._role_change.take_back(str(error)):
                        raise
                    continue
                code = await self._serve(links)
            if code is not None or life.died is not None:
                return code
            self._role_change.apply()
            self._parts.boot = _new_boot()
            if self._pages_held():
                break  # a fence was not confirmed: that memory is never used again
        return None

    async def _serve(self, links: Links | None) -> int | None:
        """From loaded to drained; the exit code, or None: the engine died, or the role changes."""
        life, role_change = self._life, self._role_change
        assert role_change is not None
        calm_collector()
        life.restarts.served(time.monotonic())
        role_change.done()
        life.enter(Phase.SERVING)
        event(
            _log, logging.INFO, "node.serving", "serving",
            role=self._config.node.role, model=self._config.model.name,
        )  # fmt: skip
        assert self._parts.engine is not None
        watch = PassWatch(self._parts.engine, self._config.engine.stall_s)
        background = [asyncio.create_task(self._run_steps()), asyncio.create_task(watch.run())]
        if links is not None:
            background.append(asyncio.create_task(links.tick()))
        try:
            while True:
                await life.changed.wait()
                life.changed.clear()
                if life.stopping:
                    return await self._drain()
                if life.died is not None:
                    return None
                if life.wanted is not None and await role_change.drain():
                    return None
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    def _pages_held(self) -> bool:
        assert self._parts.engine is not None
        counts = self._parts.engine.page_counts
        return counts.free + counts.cached != sum(counts)

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
            self._role_change = RoleChange(
                parts=self._parts,
                base=self._base,
                control=control,
                lifecycle=self._life,
                open_work=self._open_work,
            )
            admin_app = build_admin_app(control, self._records, observed.events)
            admin = await listen_admin(admin_app, config.node.admin_socket)
        except OSError as error:
            where = str(config.node.admin_socket)
            problem = Problem("node.admin_socket", f"{where}: {error.strerror}")
            raise ConfigError([problem]) from error
        stack.callback(config.node.admin_socket.unlink, missing_ok=True)
        stack.push_async_callback(admin.cleanup)
        event(_log, logging.INFO, "api.listening", "API listens", host=host, port=port)

    def _supervise(self, stack: contextlib.AsyncExitStack) -> None:
        """What looks at the node for as long as it lives."""
        assert self._control is not None
        notifier = Notifier()
        stack.callback(notifier.close)
        supervisor = Supervisor(notifier, self._life, self._parts, self._detail)
        self._control.on_reload = supervisor.reload
        for work in (self._observed.watch.run(), supervisor.run()):
            stack.callback(asyncio.create_task(work).cancel)

    def _detail(self) -> str:
        """What the phase is busy with, for the supervisor's status line."""
        if self._life.phase in (Phase.DRAINING, Phase.SWITCHING) and not self._service.loading:
            requests, transfers = self._service.open_requests, self._parts.open_transfers
            return f"{requests} requests and {transfers} transfers are left"
        return self._service.loading

    async def _load(self, stack: contextlib.AsyncExitStack) -> None:
        """The engine: transfer core and worker."""
        config = self._config
        self._fingerprint = await asyncio.to_thread(fingerprint, config.model.path)
        self._parts.host = await asyncio.to_thread(HostView, config)
        placed = await asyncio.to_thread(choose_places, config)
        wake_fds = []
        if config.node.role is not Role.COLOCATED:
            self._service.loading = "opening the NICs"
            transfer = await asyncio.to_thread(open_transfer, config, placed)
            self._parts.transfer = transfer
            stack.callback(transfer.close)
            stack.callback(self._forget_engine)  # nobody looks into what is being closed
            transfer.engine.start(asyncio.get_running_loop())
            wake_fds = transfer.wake_fds
        core = self._parts.transfer
        region = choose_region(config, None) if core is None else core.region
        engine = await start_engine(
            config, wake_fds, self._on_loading, cpus=placed.worker, region=region
        )
        stack.push_async_callback(engine.close)
        stack.callback(self._forget_engine)
        self._parts.engine = engine
        if core is not None:
            self._service.loading = "registering the KV memory"
            self._regions = await core.add_engine(engine, config)

    def _on_loading(self, loading: Loading) -> None:
        self._service.loading = f"{loading.what} {loading.ratio:.0%}"

    def _forget_engine(self) -> None:
        self._parts.engine = self._parts.transfer = None

    async def _open_links(self, stack: contextlib.AsyncExitStack) -> Links | None:
        """What this role needs beside the engine; then the node can serve. None for colocated."""
        parts, links = self._parts, None
        assert parts.engine is not None
        if parts.transfer is not None:
            links = Links(
                parts,
                parts.engine,
                parts.transfer,
                self._regions,
                model=self._model,
                fingerprint=self._fingerprint,
                records=self._records,
            )
            await links.open(stack)
        self._service.start(groups=parts.engine.groups, peers=parts.peers, pulls=parts.pull)
        assert self._control is not None
        if self._service.draining:
            self._control.set_draining(True)
        return links

    # running

    async def _unless_stopped(self, work: Coroutine[None, None, None]) -> bool:
        """Runs `work`; False if a signal came first, then `work` is cancelled."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._life.stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            return False
        stop.cancel()
        await task
        return True

    def _hung_up(self) -> None:
        """SIGHUP: what `pdnode reload` does; how it went stands in the log."""
        if self._control is not None:
            task = asyncio.create_task(_reload(self._control))
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)

    async def _run_steps(self) -> None:
        """The groups' step loops. A worker that dies ends every request; another engine follows."""
        assert self._parts.engine is not None
        groups = self._parts.engine.groups
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
            fault = not isinstance(error, EngineDied)
            if fault:
                _log.exception("the step loop failed")
            # What is said next frees pages: no pass of another group may touch them any more.
            alive = [group.worker for group in groups if not group.worker.died.done()]
            await asyncio.gather(*(worker.close() for worker in alive))
            self._engine_died(str(error), fatal=fault)
        finally:
            for loop in running:
                loop.cancel()

    def _engine_died(self, text: str, *, fatal: bool = False) -> None:
        """Every request ends. `fatal`: so does the process, which another engine would not help."""
        life = self._life
        if not life.engine_died(text, time.monotonic(), fatal=fatal):
            return
        event(
            _log, logging.ERROR, "engine.died", "the engine cannot go on",
            cause=text, deaths=life.restarts.deaths, restarts=not life.fatal,
        )  # fmt: skip
        self._service.engine_died(text, fatal=life.fatal)
        if self._parts.push is not None:
            self._parts.push.engine_failed(text)

    async def _wait_to_restart(self) -> bool:
        """False if the process is to end first."""
        life = self._life
        if life.phase is not Phase.RESTARTING:
            life.enter(Phase.RESTARTING)
        self._service.loading = f"attempt {life.restarts.deaths}, after {life.delay_s:g} s"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(life.stop.wait(), life.delay_s)
        if life.stopping:
            return False
        life.revived()
        event(
            _log, logging.WARNING, "engine.restarting", "starting another engine",
            attempt=life.restarts.deaths,
        )  # fmt: skip
        return True

    def _on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody took. A broken assertion means that some state is wrong: pages
        may be held for ever or given away too early, so the node ends and says why."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, AssertionError):
            text = f"internal error: {str(error) or context['message']}"
            self._engine_died(text, fatal=True)

    # stopping

    async def _drain(self) -> int:
        """Finish what was accepted, within the bound or until a second signal; the exit code."""
        life = self._life
        assert self._control is not None
        self._control.stopping = True
        self._control.set_draining(True)
        life.enter(Phase.DRAINING)
        event(_log, logging.INFO, "node.draining", "draining", requests=self._open_work())
        begun_at = time.monotonic()
        while self._open_work() and life.died is None:
            late = time.monotonic() - begun_at > self._config.node.shutdown_timeout_s
            if life.signals > 1 or late:
                self._service.fail_all(Unavailable("this node is shutting down"))
                if self._parts.push is not None:
                    self._parts.push.engine_failed("this node is shutting down")
                return Exit.FORCED
            await asyncio.sleep(DRAIN_POLL_S)
        return Exit.OK if life.died is None else Exit.INTERNAL

    def _open_work(self) -> int:
        """Requests, transfers that still owe or are owed a `drained`, and a pass that runs."""
        push = 0 if self._parts.push is None else self._parts.push.open_pushes
        pull = 0 if self._parts.pull is None else self._parts.pull.open_pulls
        busy = self._parts.engine is not None and self._parts.engine.busy
        return self._service.open_requests + push + pull + busy


async def _reload(control: Control) -> None:
    with contextlib.suppress(ActionRefused):
        await control.act(Reload())


def _same_engine(one: Role, other: Role) -> bool:
    """Whether what was opened for one role serves the other: a colocated node has no core."""
    return one is other or Role.COLOCATED not in (one, other)


def _new_boot() -> BootId:
    return BootId(os.urandom(16).hex())
