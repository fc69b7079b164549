"""Another role at run time: ask, drain, change, and take it back where it cannot be had."""

import asyncio
import logging
import time
from collections.abc import Callable

from pdnode.api.admin_actions import ActionRefused
from pdnode.config import Config
from pdnode.confighost import peer_listen_problem
from pdnode.configrole import with_role
from pdnode.daemon.control import Control
from pdnode.daemon.figures import Figures
from pdnode.daemon.lifecycle import Lifecycle, Phase
from pdnode.errors import ConfigError
from pdnode.obs.log import event
from pdnode.types import Role

DRAIN_POLL_S = 0.05
_log = logging.getLogger(__name__)


class RoleChange:
    """One at a time. `base` has the NICs as they were found at the start. `open_work` counts what a
    drain waits for.
    """

    def __init__(
        self,
        *,
        parts: Figures,
        base: Config,
        control: Control,
        lifecycle: Lifecycle,
        open_work: Callable[[], int],
    ) -> None:
        self._parts = parts
        self._base = base
        self._control = control
        self._lifecycle = lifecycle
        self._open_work = open_work
        self._from: Role | None = None  # while the change is under way
        control.switch_role = self._ask

    def _ask(self, role: Role) -> str:
        config = self._parts.config
        if role is config.node.role:
            return f"the role is {role} already"
        try:
            wanted = with_role(config, self._base, role)
        except ConfigError as error:
            text = "; ".join(str(one) for one in error.problems)
            raise ActionRefused(422, f"not as {role}: {text}") from error
        if role is Role.PREFILL and (problem := peer_listen_problem(wanted)) is not None:
            raise ActionRefused(409, f"not as {role}: {problem}")
        self._from = config.node.role
        self._control.switching = True
        self._control.role_failure = ""
        self._lifecycle.want(role)
        return f"changing from {config.node.role} to {role}: {self._open_work()} are left to finish"

    async def drain(self) -> bool:
        """Until nothing is open. False: it takes too long, and the role stays; or the node has to
        do something else first.
        """
        life, config = self._lifecycle, self._parts.config
        assert life.wanted is not None
        event(
            _log, logging.INFO, "node.switching", "draining for another role",
            role=life.wanted, requests=self._open_work(),
        )  # fmt: skip
        life.enter(Phase.SWITCHING)
        self._control.set_draining(True)
        deadline = time.monotonic() + config.node.shutdown_timeout_s
        while self._open_work():
            if life.stopping or life.died is not None:
                life.changed.set()
                return False
            if time.monotonic() > deadline:
                self._failed(
                    f"{life.wanted}: work was left after {config.node.shutdown_timeout_s:g} s"
                )
                self.done()
                life.enter(Phase.SERVING)
                return False
            await asyncio.sleep(DRAIN_POLL_S)
        return True

    def apply(self) -> None:
        """Links are closed and nothing is open: from now on the node has the new role."""
        wanted, self._lifecycle.wanted = self._lifecycle.wanted, None
        assert wanted is not None
        self._become(wanted)

    def take_back(self, text: str) -> bool:
        """The new role cannot be had. False if none was to be."""
        if self._from is None or self._parts.config.node.role is self._from:
            return False
        self._failed(f"{self._parts.config.node.role}: {text}")
        self._become(self._from)
        return True

    def done(self) -> None:
        """The node serves, in whatever role; a change that was cut short is forgotten."""
        if not self._control.switching:
            return
        self._from = self._lifecycle.wanted = None
        self._control.switching = False
        self._control.set_draining(self._control.drain_asked)

    def _failed(self, text: str) -> None:
        self._control.role_failure = text
        event(_log, logging.WARNING, "node.switch_failed", "the role stays", cause=text)

    def _become(self, role: Role) -> None:
        parts = self._parts
        parts.config = with_role(parts.config, self._base, role)
        parts.service.change_role(role)
        parts.service.loading = f"changing to {role}"
