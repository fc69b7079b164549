"""What an operator can tell this node, and ask of it: the admin surface's side of the daemon."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from pdnode.api.admin import SettingValue
from pdnode.api.admin_actions import (
    Action,
    ActionRefused,
    Cancel,
    ChangeRole,
    Drain,
    Reload,
    SetLogLevel,
    Undrain,
)
from pdnode.configkinds import shown
from pdnode.configschema import LOG_LEVELS
from pdnode.daemon.figures import Figures
from pdnode.daemon.flight import Flight
from pdnode.daemon.reload import ConfigSource, Reloader, can_reload, changed_keys
from pdnode.errors import ConfigError
from pdnode.obs import log
from pdnode.obs import snapshot as form
from pdnode.obs.fabric_report import Step
from pdnode.obs.log import event
from pdnode.obs.warnings import Condition
from pdnode.types import Role

_log = logging.getLogger(__name__)
_NOT_HERE = "requests are cancelled on the node that took them, and this is a prefill node"


class Control:
    """Implements api.admin.AdminNode and, with the actions' refusals, a source of warnings."""

    def __init__(self, parts: Figures, source: ConfigSource, reloader: Reloader) -> None:
        self._parts = parts
        self._source = source
        self._reloader = reloader
        self._reload_failure = ""
        self._lock = asyncio.Lock()
        self.role_failure = ""  # why the last change of role came to nothing
        self.drain_asked = False  # by an operator, who has not taken it back
        self.stopping = False
        self.switching = False  # a change of role is under way
        self.switch_role: Callable[[Role], str] | None = None
        self.on_reload: Callable[[bool], None] = lambda begins: None
        self.encode_snapshot: Callable[[], bytes] | None = None

    # what it shows

    def snapshot(self) -> bytes:
        assert self.encode_snapshot is not None
        return self.encode_snapshot()

    def settings(self) -> Sequence[SettingValue]:
        """As in effect: `pdnode role` outranks the file."""
        loaded, role = self._source.loaded, self._parts.config.node.role
        changed = {} if role is loaded.config.node.role else {"node.role": shown(str(role))}
        return [
            SettingValue(
                one.where,
                changed.get(one.where, one.value),
                "pdnode role" if one.where in changed else one.origin,
                can_reload(one.where),
            )
            for one in loaded.settings
        ]

    def log_level(self) -> str:
        return log.level()

    def actions(self) -> list[form.Action]:
        """All there are, each with why it would be refused now."""
        already = self.drain_asked or (self._parts.service.draining and not self.switching)
        prefill = self._parts.config.node.role is Role.PREFILL
        return [
            form.Action(name=Drain.name, refused="draining already" if already else None),
            form.Action(name=Undrain.name, refused=self._no_undrain()),
            form.Action(name=Cancel.name, refused=_NOT_HERE if prefill else None),
            form.Action(name=Reload.name),
            form.Action(name=ChangeRole.name, refused=self.no_switch()),
            form.Action(name=SetLogLevel.name),
        ]

    def conditions(self) -> list[Condition]:
        """For the warnings registry."""
        found = [Condition("W110", self._reload_failure)] if self._reload_failure else []
        role, wanted = self._parts.config.node.role, self._source.loaded.config.node.role
        if role is not wanted:
            found.append(Condition("W106", f"{role} here, {wanted} in the file"))
        if self.role_failure:
            found.append(Condition("W107", self.role_failure))
        engine = self._parts.engine
        if engine is not None and (pages := engine.page_counts.quarantined):
            most = engine.max_quarantined
            code = "W121" if pages > most else "W120"
            text = f"{pages} pages wait for a writer's word or a fence, at most {most} may"
            found.append(Condition(code, text))
        if self._parts.peers is not None:
            for code, text in self._parts.peers.warnings():
                found.append(Condition(code, text, subject=text.partition(": ")[0]))
        return found

    def fabric_test(self, peer: str) -> AsyncIterator[Step]:
        """The steps of `pdnode fabric-test`; ActionRefused where there is nothing to test."""
        test, peers = self._parts.fabric_test, self._parts.peers
        if self._parts.config.node.role is not Role.DECODE:
            raise ActionRefused(409, "run it on the decode node, with the name of this one")
        if test is None or peers is None:
            raise ActionRefused(409, "this node is loading")
        try:
            link = peers.offered(peer)
        except KeyError:
            known = ", ".join(one.name for one in peers.status())
            raise ActionRefused(404, f"peer: one of {known or 'none'}") from None
        if link is None:
            error = next(one.last_error for one in peers.status() if one.name == peer)
            raise ActionRefused(409, f"{peer}: its link is not up: {error or 'not yet tried'}")
        return test.run(peer, link)

    # what it does

    async def act(self, action: Action) -> str:
        """Do it and say what was done, or raise ActionRefused. One after the other."""
        try:
            async with self._lock:
                text = await self._act(action)
        except ActionRefused as refused:
            event(
                _log, logging.WARNING, "admin.refused", "action refused",
                action=action.name, cause=str(refused),
            )  # fmt: skip
            raise
        event(_log, logging.INFO, "admin.done", "action done", action=action.name, result=text)
        return text

    async def _act(self, action: Action) -> str:
        match action:
            case Drain():
                return self._drain()
            case Undrain():
                return self._undrain()
            case Cancel(request_id=request_id):
                return self._cancel(request_id)
            case Reload():
                self.on_reload(True)
                try:
                    return await self._reload()
                finally:
                    self.on_reload(False)
            case ChangeRole(role=role):
                return self._change_role(role)
            case SetLogLevel(level=level):
                if level not in LOG_LEVELS:
                    raise ActionRefused(400, f"level: one of {', '.join(LOG_LEVELS)}")
                log.set_level(level)
                return f"log level {level}"
            case _:
                raise AssertionError(action)

    def set_draining(self, wanted: bool) -> None:
        parts = self._parts
        parts.service.draining = wanted
        if parts.push is not None:
            parts.push.draining = wanted
        if parts.peers is not None:
            parts.peers.drain(wanted)

    def _drain(self) -> str:
        self.drain_asked = True
        if not self._parts.service.draining:
            self.set_draining(True)
        requests, transfers = self._parts.service.open_requests, self._parts.open_transfers
        return f"draining: {requests} requests and {transfers} transfers are left"

    def _undrain(self) -> str:
        if not self._parts.service.draining:
            return "takes work already"
        if (text := self._no_undrain()) is not None:
            raise ActionRefused(409, text)
        self.drain_asked = False
        self.set_draining(False)
        return "takes work again"

    def _no_undrain(self) -> str | None:
        if self.stopping:
            return "this node is stopping"
        if self.switching:
            return "the role is being changed"
        return None if self._parts.service.draining else "not draining"

    def no_switch(self) -> str | None:
        """Why the role cannot be changed now."""
        if self.stopping:
            return "this node is stopping"
        if self.switching:
            return "the role is being changed"
        service = self._parts.service
        return f"loading: {service.loading}" if service.loading else None

    def _change_role(self, role: str) -> str:
        if role not in list(Role):
            raise ActionRefused(400, f"role: one of {', '.join(Role)}")
        if (text := self.no_switch()) is not None:
            raise ActionRefused(409, text)
        assert self.switch_role is not None
        return self.switch_role(Role(role))

    def _cancel(self, request_id: str) -> str:
        if self._parts.config.node.role is Role.PREFILL:
            raise ActionRefused(409, _NOT_HERE)
        flight = self._find(request_id)
        state = "running" if flight.generated else "waiting"
        flight.cancel("cancelled")
        return f"{flight.request.request_id}: cancelled while {state}"

    def _find(self, request_id: str) -> Flight:
        flights = self._parts.service.flights()
        for flight in flights:
            if flight.request.request_id == request_id:
                return flight
        # The client's own id: this node has added 8 hex digits to make it unique.
        same = [f for f in flights if f.request.request_id.rpartition("-")[0] == request_id]
        if len(same) > 1:
            ids = ", ".join(flight.request.request_id for flight in same[:8])
            raise ActionRefused(409, f"request_id: {len(same)} requests have it: {ids}")
        if not same:
            raise ActionRefused(404, "request_id: no open request has it")
        return same[0]

    async def _reload(self) -> str:
        try:
            loaded = await asyncio.to_thread(self._source.read)
        except ConfigError as error:
            return self._reload_failed(422, "; ".join(str(one) for one in error.problems))
        changed = changed_keys(self._source.loaded, loaded)
        fixed = [key for key in changed if not can_reload(key)]
        if fixed:
            text = f"need a restart, so nothing was changed: {', '.join(fixed)}"
            return self._reload_failed(409, text)
        if problems := self._reloader.problems(loaded.config):
            return self._reload_failed(422, "; ".join(str(one) for one in problems))
        self._reloader.apply(loaded.config)
        self._source.loaded = loaded
        self._reload_failure = ""
        return f"reloaded: {', '.join(changed)}" if changed else "reloaded: nothing has changed"

    def _reload_failed(self, status: int, text: str) -> str:
        self._reload_failure = text
        raise ActionRefused(status, text)
