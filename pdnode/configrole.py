"""The configuration of a node that runs in another role than its file says. Pure."""

import dataclasses

from pdnode.config import Config, NicConfig
from pdnode.configparse import complete_nic, default_nics
from pdnode.configrules import CROSS_RULES, broken
from pdnode.errors import ConfigError
from pdnode.types import Role


def with_role(config: Config, base: Config, role: Role) -> Config:
    """`config` in another role. The NICs are those of `base`, as they were found at the start.

    Raises ConfigError with what the file lacks for this role: a token, a NIC, a [[prefill]] table.
    """
    node = dataclasses.replace(config.node, role=role)
    changed = dataclasses.replace(config, node=node)
    nics = base.fabric.nics or default_nics(changed)
    fabric = dataclasses.replace(config.fabric, nics=tuple(_nic(nic, role) for nic in nics))
    changed = dataclasses.replace(changed, fabric=fabric)
    problems = broken(changed, CROSS_RULES, frozenset())
    if problems:
        raise ConfigError(problems)
    return changed


def _nic(nic: NicConfig, role: Role) -> NicConfig:
    """Only a prefill node listens on its NICs."""
    if role is not Role.PREFILL:
        return dataclasses.replace(nic, listen="", advertise="")
    return complete_nic(nic, role)
