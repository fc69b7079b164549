"""Measures what `[peer] verify` costs: digests of a prompt's pages, and what the loop feels of it.

    .venv/bin/python scripts/measure_digest.py [TOKENS]

Pages as those of SmolLM2-135M in float32; the thread and the compiled core are the daemon's.
"""

import asyncio
import os
import statistics
import sys
import time

from pdnode.core.geometry import KvGeometry
from pdnode.fabric._native import Fabric
from pdnode.fabric.library import find_library
from pdnode.messenger.digests import Digester

RUNS = 100
TICK_S = 0.001


async def lateness_ms(seconds: float) -> list[float]:
    """How late the loop woke from each sleep of `TICK_S`."""
    found = []
    end = time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        await asyncio.sleep(TICK_S)
        found.append(1e3 * (time.perf_counter() - before - TICK_S))
    return sorted(found)


async def digest_all(digester: Digester, region: int, pages: list[int]) -> list[float]:
    """Milliseconds of each of `RUNS` jobs, one after the other."""
    times = []
    for _ in range(RUNS):
        done = asyncio.Event()

        def job() -> float:
            began = time.perf_counter()
            digester.digest(region, 0, digester.geometry.page_bytes, pages)
            return 1e3 * (time.perf_counter() - began)

        def told(took_ms: float, done: asyncio.Event = done) -> None:
            times.append(took_ms)
            done.set()

        digester.run(job, told)
        await done.wait()
    return times


async def measure(tokens: int) -> None:
    geometry = KvGeometry("gqa", 30, 3, 64, 16, "float32", 1, 2 * -(-tokens // 16))
    fabric = Fabric(str(find_library("auto", "tcp")), "tcp", "adaptive")
    group = fabric.add_group([("lo", "127.0.0.1")])
    fd = os.memfd_create("kv")
    os.truncate(fd, geometry.region_bytes)
    region = fabric.add_region(group, fd, geometry.region_bytes, geometry.page_bytes)
    digester = Digester(fabric, geometry)
    pages = list(range(0, geometry.pages, 2))
    idle = await lateness_ms(1.0)
    busy_task = asyncio.create_task(digest_all(digester, region, pages))
    busy = []
    while not busy_task.done():
        busy += await lateness_ms(0.1)
    times = busy_task.result()
    size = len(pages) * geometry.layers * geometry.page_bytes
    median = statistics.median(times)
    print(f"{tokens} tokens, {size / 1e6:.0f} MB: median {median:.1f} ms, best {min(times):.1f} ms")
    print(f"{size / median / 1e6:.1f} GB/s")
    for name, found in (("idle", idle), ("digesting", sorted(busy))):
        middle, late = found[len(found) // 2], found[int(0.99 * len(found))]
        print(f"loop {name}: p50 {middle:.2f} ms late, p99 {late:.2f} ms late")
    digester.close()
    fabric.close()


asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
