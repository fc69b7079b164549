"""`-m tests.cuda.choices REGION DEVICE PROVIDER ROLE LIBRARY [verify]` prints what is chosen."""

import dataclasses
import sys
from pathlib import Path

from pdnode.configparse import parse
from pdnode.daemon.kvregion import choose_region
from pdnode.errors import ConfigError
from pdnode.types import Role

region, device, provider, role, library, *rest = sys.argv[1:]
config = parse(
    {
        "config_version": 1,
        "node": {"role": role},
        "model": {"path": "/"},
        "kv": {"region": region},
        "fabric": {"provider": provider, "nics": [{"name": "a", "address": "127.0.0.1"}]},
        "peer": {"verify": "once" if rest else "off"},
    }
)
assert not isinstance(config, list), config
engine = dataclasses.replace(config.engine, device=device)
config = dataclasses.replace(config, engine=engine)
try:
    choice = choose_region(config, None if config.node.role is Role.COLOCATED else Path(library))
    sys.stdout.write(f"{choice.kind}: {choice.reason}\n")
except ConfigError as error:
    sys.stdout.write(f"{error}\n")
