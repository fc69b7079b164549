"""What a changed configuration file means for a running node: which keys, and how they apply."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from pdnode.api.app import reload_app
from pdnode.api.listener import ApiListener
from pdnode.config import Config
from pdnode.configfile import Loaded
from pdnode.configrules import CROSS_RULES, broken, reading_problems
from pdnode.configschema import TABLES
from pdnode.daemon.figures import Figures
from pdnode.errors import Problem
from pdnode.obs import log
from pdnode.types import RegionKind

_INDEX = re.compile(r"\[\d+\]")
_RELOADABLE = frozenset(
    f"{table.name}.{key.name}" for table in TABLES for key in table.keys if key.reload
)


@dataclass(slots=True)
class ConfigSource:
    """Where the configuration is read from, and what it said last. `read` raises ConfigError."""

    read: Callable[[], Loaded]
    loaded: Loaded


def can_reload(where: str) -> bool:
    """`where` as settings and problems name a key: `prefill[0].address`."""
    return _INDEX.sub("", where) in _RELOADABLE


def changed_keys(old: Loaded, new: Loaded) -> list[str]:
    """Keys whose value differs, is new or is gone; those of secrets also if only their file is."""
    before = {setting.where: setting.value for setting in old.settings}
    after = {setting.where: setting.value for setting in new.settings}
    changed = [where for where in {**before, **after} if before.get(where) != after.get(where)]
    here, there = old.config, new.config
    for key, differs in (
        ("peer.token_credential", here.peer.token != there.peer.token),
        ("peer.tls_certificate", here.peer.tls != there.peer.tls),
        ("api.keys_credential", here.api.keys != there.api.keys),
    ):
        if differs and key not in changed:
            changed.append(key)
    return changed


@dataclass(slots=True)
class Reloader:
    """Gives new values to the parts that run. Part of `parts` may not be up yet."""

    parts: Figures
    app: web.Application
    listener: ApiListener

    def _in_effect(self, new: Config) -> Config:
        """NICs and device of the running configuration are resolved, and cannot have changed; its
        role is another one where an operator has changed it."""
        now = self.parts.config
        node = dataclasses.replace(new.node, role=now.node.role)
        engine = dataclasses.replace(
            new.engine, device=now.engine.device, device_reason=now.engine.device_reason
        )
        return dataclasses.replace(new, node=node, engine=engine, fabric=now.fabric)

    def problems(self, new: Config) -> list[Problem]:
        """What of `new` does not go with the role that this node has now."""
        config = self._in_effect(new)
        found = broken(config, CROSS_RULES, frozenset())
        engine = self.parts.engine
        if engine is not None and engine.region.kind is RegionKind.CUMEM and not found:
            found = list(reading_problems(config))
        return found

    def apply(self, new: Config) -> None:
        """`new` differs from what runs in keys that can be reloaded only."""
        parts = self.parts
        config = self._in_effect(new)
        parts.config = config
        log.set_level(config.node.log_level)
        self.listener.reload(config.api)
        reload_app(self.app, config.api)
        parts.service.max_waiting = config.engine.max_waiting
        if parts.engine is not None:
            for group in parts.engine.groups:
                group.steps.scheduler.limit_running(config.engine.max_running)
                gate = group.gate
                gate.max_quarantined = int(config.kv.max_quarantined_ratio * sum(gate.pool.counts))
                gate.pump()
        if parts.pull is not None:
            parts.pull.reload(config.peer)
        if parts.push is not None:
            parts.push.reload(config.peer, max_waiting=config.engine.max_waiting)
        if parts.peers is not None:
            parts.peers.reload(config)
        if parts.reload_links is not None:
            parts.reload_links(config.peer)
