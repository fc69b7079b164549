"""`pdnode serve` processes on this host: started, waited for, stopped. For demo and benchmarks."""

import asyncio
import contextlib
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from pdnode.errors import PdnodeError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


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


def free_ports(count: int) -> list[int]:
    """Ports of loopback that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
