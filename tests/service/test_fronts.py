"""A decode node of two is stopped behind nginx and behind HAProxy, and no client notices.

The configurations are those of examples/front with other addresses. `make fronts` fetches the
servers; one that is neither installed nor fetched is skipped.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode.localnodes import free_ports
from tests.support.nodes import Client, NodeSpec, cluster, requests, until
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).resolve().parents[2]
FRONT = ROOT / "examples" / "front"
FETCHED = ROOT / "build" / "fronts"  # by scripts/fronts.sh
CLIENTS, OUTPUT = 6, 12
BEFORE, AFTER = 24, 24  # answers until the node is told to stop, and after it has ended


def program(name: str) -> str:
    """Path of a server that is installed, often where only root looks, or fetched."""
    places = (os.environ["PATH"], "/usr/sbin", "/usr/local/sbin", str(FETCHED / "usr" / "sbin"))
    found = shutil.which(name, path=":".join(places))
    if found is None:
        pytest.skip(f"{name} is not installed, and `make fronts` could not fetch it")
    return found


def with_fetched_libraries() -> dict[str, str]:
    """The environment of a server: with what it needs and this host has not installed."""
    folders = {str(path.parent) for path in FETCHED.glob("**/lib/**/*.so.*")}
    return os.environ | {"LD_LIBRARY_PATH": ":".join(sorted(folders))}


def nginx(text: str, folder: Path) -> list[str]:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder / kind}; " for kind in kinds)
    path = folder / "nginx.conf"
    path.write_text(text.replace("http {", f"http {{ access_log off; {paths}", 1))
    root = " user root;" if os.getuid() == 0 else ""  # its workers shall read the folder
    settings = f"daemon off; pid {folder / 'nginx.pid'};{root}"
    return [program("nginx"), "-p", str(folder), "-e", "stderr", "-g", settings, "-c", str(path)]


def haproxy(text: str, folder: Path) -> list[str]:
    path = folder / "haproxy.cfg"
    path.write_text(text)
    return [program("haproxy"), "-db", "-f", str(path)]


SERVERS = {"nginx": ("nginx.conf", nginx, "-t"), "haproxy": ("haproxy.cfg", haproxy, "-c")}


def adapted(name: str, *, port: int, backends: list[int]) -> str:
    """The example, on `port`, with so many of its three nodes."""
    text = (FRONT / SERVERS[name][0]).read_text()
    lines = []
    for line in text.splitlines():
        node = re.search(r"192\.0\.2\.2(\d):8000", line)
        if node is not None:
            if int(node[1]) > len(backends):
                continue
            line = line.replace(node[0], f"127.0.0.1:{backends[int(node[1]) - 1]}")
        lines.append(re.sub(r"(listen |bind :)8080", rf"\g<1>{port}", line))
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "front.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=with_fetched_libraries())
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.mark.parametrize("name", SERVERS)
def test_the_example_is_valid(name: str, tmp_path: Path) -> None:
    text = adapted(name, port=free_ports(1)[0], backends=free_ports(3))
    _, command, check = SERVERS[name]
    done = subprocess.run(
        [*command(text, tmp_path), check], capture_output=True, timeout=30,
        env=with_fetched_libraries(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("name", SERVERS)
async def test_a_node_is_stopped_under_load(name: str, tiny_model: Path, tmp_path: Path) -> None:
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path)
    decodes = [NodeSpec(f"dc{n}", "decode", tiny_model, tmp_path, (prefill,)) for n in (1, 2)]
    front = NodeSpec("front", "decode", tiny_model, tmp_path)
    backends = [decode.ports[0] for decode in decodes]
    command = SERVERS[name][1](adapted(name, port=front.ports[0], backends=backends), tmp_path)
    async with cluster(prefill, *decodes) as (running, (_, first, _second)):
        with started(command, tmp_path) as server:
            client = Client(first.session, front)
            answers: list[int] = []
            enough = asyncio.Event()

            async def ask(seed: int) -> None:
                while not enough.is_set():
                    prompt = random_prompt(40, seed=seed)
                    seed += CLIENTS
                    if seed % 2:
                        answers.append(len(await client.tokens(prompt, OUTPUT)))
                    else:
                        events = [event async for event in client.events(prompt, OUTPUT)]
                        parts = [one["choices"][0]["token_ids"] for one in events]
                        answers.append(sum(map(len, parts)))

            def answered(count: int) -> bool:
                assert server.poll() is None, (tmp_path / "front.log").read_text()
                assert not any(task.done() for task in tasks), tasks
                return len(answers) >= count

            await until(lambda: listens(front.ports[0]), f"{name} listens")
            tasks = [asyncio.create_task(ask(seed)) for seed in range(CLIENTS)]
            try:
                await until(lambda: answered(BEFORE), "answers", 60)
                assert all([len(await requests(decode)) for decode in decodes])
                running[1].send_signal(signal.SIGTERM)
                assert await running[1].ended() == 0
                count = len(answers)
                await until(lambda: answered(count + AFTER), "more answers", 60)
            finally:
                enough.set()
                await asyncio.gather(*tasks)
            assert answers == [OUTPUT] * len(answers)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
