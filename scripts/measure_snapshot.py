"""Cost and size of the snapshot with 256 requests in flight, for docs/performance.md.

    .venv/bin/python scripts/measure_snapshot.py

The daemon side is real (service, messenger, pages, schedule); model, NICs and peers are stand-ins:
8 NICs with a full minute of history, 16 peers, as many events and warnings as the document takes.
"""

import asyncio
import json
import logging
import statistics
import sys
import time
from pathlib import Path

ROUNDS = 300
REQUESTS = 256

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


async def measure() -> dict[str, float]:
    """Milliseconds (median, 99th percentile) and bytes."""
    from pdnode.obs.log import event
    from pdnode.obs.snapshot import MAX_EVENTS, MAX_WARNINGS
    from pdnode.obs.warnings import Condition
    from tests.support.busy_node import busy_node

    node = busy_node()
    await node.take(REQUESTS)
    clock = time.monotonic()
    watch = node.observation.watch
    watch.clock = lambda: clock
    for second in range(62):
        clock += 1
        node.fabric.seconds = second
        watch.sample()
    log = logging.getLogger("measure")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [node.observation.events]
    for number in range(MAX_EVENTS):
        event(log, logging.WARNING, "peer.lost", "no session", peer=f"pf-{number}", cause="x" * 60)
    conditions = [
        Condition("W205", f"prefill-{number}: {'y' * 60}", f"prefill-{number}")
        for number in range(MAX_WARNINGS)
    ]
    node.observation.warnings.add_source(lambda: conditions)
    took_ms = []
    size = 0
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        size = len(node.control.snapshot())
        took_ms.append(1e3 * (time.perf_counter() - begin))
    quantiles = statistics.quantiles(took_ms, n=100)
    return {
        "requests": REQUESTS,
        "median_ms": round(statistics.median(took_ms), 3),
        "p99_ms": round(quantiles[98], 3),
        "bytes": size,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure())))
