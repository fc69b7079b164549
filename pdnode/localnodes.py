"""`pdnode serve` processes on this host: started, waited for, stopped. For demo and benchmarks."""

import asyncio
import contextlib
import functools
import itertools
import random
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from pdnode.errors import PdnodeError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
LOWEST_PORT = 10_000


class NodeFailed(PdnodeError):
    """A node did not start, or ended; the text has its log."""


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A running process; its admin socket is where its configuration says."""

    name: str
    process: asyncio.subprocess.Process
    log: Path


@contextlib.asynccontextmanager
async def serve_node(
    name: str, config: str, folder: Path, cpus: Sequence[int] = ()
) -> AsyncIterator[LocalNode]:
    """Runs a node with the text `config`, kept to `cpus` if any are named. SIGTERM at the end."""
    path, log = folder / f"{name}.toml", folder / f"{name}.log"
    path.write_text(config)
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cpus))] if cpus else []
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *pinned, sys.executable, "-m", "pdnode", "serve", "--config", str(path),
            stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink,
        )  # fmt: skip
    try:
        yield LocalNode(name, process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def wait_ready(
    url: str, nodes: Sequence[LocalNode], show: Callable[[float, str], None]
) -> None:
    """Until the node at `url` is ready; `show` gets a ratio and what it waits for. NodeFailed."""
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while asyncio.get_running_loop().time() < deadline:
            for node in nodes:
                if node.process.returncode is not None:
                    raise NodeFailed(f"the {node.name} node ended:\n{node.log.read_text()}")
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        return
                    why = msgspec.json.decode(await answer.read())[0]["text"]
                    loaded = re.search(r"(\d+)%", why)
                    show(int(loaded[1]) / 100 if loaded else 1.0, why)
            await asyncio.sleep(0.1)
    logs = "\n".join(node.log.read_text() for node in nodes)
    raise NodeFailed(f"not ready after {START_TIMEOUT_S:g} s:\n{logs}")


@functools.cache
def _ports() -> Iterator[int]:
    dealt_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = list(range(LOWEST_PORT, dealt_out if dealt_out > 2 * LOWEST_PORT else 65536))
    random.Random().shuffle(ports)
    return itertools.cycle(ports)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on, none of them given out lately.

    They lie below those that the kernel deals out to connections, so that none is taken by some
    client's connection between this call and the node's start.
    """
    free: list[int] = []
    while len(free) < count:
        port = next(_ports())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
    return free
