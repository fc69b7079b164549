"""What `pdnode top` at 1 Hz costs, itself and the daemon, for docs/performance.md.

    .venv/bin/python scripts/measure_console.py MODEL_DIRECTORY [SECONDS]

An idle colocated node, `SECONDS` (20) without a console and as long with one in a pseudo-terminal
of 100x30, three times in turns. Shares of one core, from /proc, start-up not included.
"""

import asyncio
import fcntl
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from pdnode.localnodes import free_ports, serve_node, wait_ready

TURNS = 3
START_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


class Screen:
    """`pdnode top` in a pseudo-terminal; what it draws is read and thrown away."""

    def __init__(self, socket: Path) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdnode", "top", "--socket", str(socket)],
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"},
        )  # fmt: skip
        os.close(inner)
        asyncio.get_running_loop().add_reader(self._fd, lambda: os.read(self._fd, 1 << 16))

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


async def shares(pids: list[int], seconds: float) -> list[float]:
    """Of one core, that each process takes from now on."""
    before, began = [cpu_s(pid) for pid in pids], time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    return [(cpu_s(pid) - then) / took for pid, then in zip(pids, before, strict=True)]


async def measure(model: Path, seconds: float) -> dict[str, float]:
    alone: list[float] = []
    watched: list[float] = []
    console: list[float] = []
    with tempfile.TemporaryDirectory(prefix="pdnode-measure-") as name:
        folder, (port,) = Path(name), free_ports(1)
        config = f"""config_version = 1
[node]
role = "colocated"
admin_socket = "{folder}/node.sock"
[model]
path = "{model}"
[kv]
pool_bytes = "256MiB"
[api]
listen = "127.0.0.1:{port}"
"""
        async with serve_node("node", config, folder) as node:
            await wait_ready(f"http://127.0.0.1:{port}", [node], lambda _ratio, _what: None)
            for _ in range(TURNS):
                alone += await shares([node.process.pid], seconds)
                screen = Screen(folder / "node.sock")
                await asyncio.sleep(START_S)
                pids = [node.process.pid, screen.process.pid]
                with_it, itself = await shares(pids, seconds)
                screen.close()
                watched.append(with_it)
                console.append(itself)
    return {
        "seconds": seconds,
        "daemon_alone": round(statistics.median(alone), 4),
        "daemon_watched": round(statistics.median(watched), 4),
        "console": round(statistics.median(console), 4),
        "load_average": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    took_s = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    print(json.dumps(asyncio.run(measure(Path(sys.argv[1]).resolve(), took_s))))
