"""`-m tests.cuda.chosen_nics SYS GPU…` prints the device groups of a node with ranks on these GPUs
of the stub, on the host that SYS shows."""

import sys
from pathlib import Path

from pdnode import configchoice
from pdnode.configparse import parse
from pdnode.topology.detect import detect

root, *gpus = sys.argv[1:]
config = parse(
    {
        "config_version": 1,
        "node": {"role": "prefill"},
        "model": {"path": "/"},
        "engine": {"tp": len(gpus), "gpus": gpus},
        "kv": {"region": "staged"},
        "peer": {"listen": "127.0.0.1:0"},
        "fabric": {"nics": [{"name": "a", "address": "127.0.0.1"}]},
    }
)
assert not isinstance(config, list), config
configchoice.detect = lambda: detect(Path(root))  # type: ignore[attr-defined]
choice = configchoice.choose_nics(config, lambda name: "192.0.2.1")
sys.stdout.write(f"{choice.homes} {[(one.nic.name, one.group) for one in choice.chosen]}\n")
