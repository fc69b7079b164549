"""Several nodes in one process, `-m tests.cuda.one_process REPORT CONFIG…`: the fake libfabric
connects nothing beyond it. Ends with SIGTERM, and writes to REPORT what the fake and the stub of
the CUDA driver have to say, as JSON.
"""

import asyncio
import ctypes
import json
import signal
import sys
from functools import partial
from pathlib import Path

from pdnode.configfile import load_settings
from pdnode.daemon.node import Node
from pdnode.daemon.reload import ConfigSource
from pdnode.obs import log
from tests.support.cuda_stub import Stub


def _node(path: str) -> Node:
    """As `pdnode serve`, but for the look at the host, which has no such NIC."""
    read = partial(load_settings, Path(path), overrides={}, allow_test_provider=False)
    loaded = read()
    log.configure(level=loaded.config.node.log_level, log_format="text")
    return Node(loaded.config, ConfigSource(read, loaded))


async def _run(nodes: list[Node]) -> list[int]:
    runs = [asyncio.create_task(node.run()) for node in nodes]
    await asyncio.sleep(0)  # each took the signal for itself

    def end_all() -> None:
        for node in nodes:
            node._life.signalled()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end_all)
    return await asyncio.gather(*runs)


def main() -> None:
    report, *paths = sys.argv[1:]
    nodes = [_node(path) for path in paths]
    library = str(nodes[0]._config.fabric.library)
    codes = asyncio.run(_run(nodes))
    fake = ctypes.CDLL(library)
    fake.fake_violations.restype = ctypes.c_char_p
    fake.fake_count.restype = ctypes.c_int64
    stub = Stub()
    found = {
        "codes": [int(code) for code in codes],
        "fake_violations": fake.fake_violations().decode().splitlines(),
        "registrations": fake.fake_count(b"mr"),
        "by_dma_buf": fake.fake_count(b"by_attributes"),
        "stub_violations": stub.violations(),
        "live": stub.live(),
    }
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
