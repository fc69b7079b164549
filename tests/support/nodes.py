"""Real nodes for end-to-end tests: `pdnode serve` processes on loopback, and a client for them."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from pdnode.localnodes import free_ports
from pdnode.obs.records import RequestRecord, TransferRecord

Record = TypeVar("Record")
READY_TIMEOUT_S = 180.0  # four nodes import torch at once, on a busy machine
STOP_TIMEOUT_S = 30.0
EVENT_TIMEOUT_S = 20.0
PATIENT = {"link_lost_s": 30.0, "request_stall_s": 300.0}
"""`[peer]` of nodes that are not to lose each other on a machine that has far too much to do."""


_SPEAKING = """
import sys
from pdnode.core import wire
wire.PROTOCOL_MIN, wire.PROTOCOL_MAX = int(sys.argv.pop(1)), int(sys.argv.pop(1))
from pdnode.cli import main
sys.exit(main())
"""


@dataclass(slots=True)
class NodeSpec:
    """What a test says of one node; ports are kept over restarts."""

    name: str
    role: str
    model: Path
    folder: Path
    peers: tuple["NodeSpec", ...] = ()
    policy: str = "refuse"
    engine: Mapping[str, object] = field(default_factory=dict)
    kv: Mapping[str, object] = field(default_factory=dict)
    peer: Mapping[str, object] = field(default_factory=dict)
    node: Mapping[str, object] = field(default_factory=dict)
    topology: Mapping[str, object] = field(default_factory=dict)
    provider: str = "tcp"
    link_host: str = "127.0.0.1"  # where a prefill node's peer link listens
    nic: Mapping[str, object] | None = None  # its `[[fabric.nics]]` table
    nics: Sequence[Mapping[str, object]] = ()  # or several
    netns: str = ""  # network namespace that it runs in
    api: Mapping[str, object] = field(default_factory=dict)
    fabric: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)  # added to the test's own
    protocol: tuple[int, int] | None = None  # versions that it says it speaks, if not its own
    ports: list[int] = field(default_factory=lambda: free_ports(3))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def admin(self) -> Path:
        return self.folder / f"{self.name}.sock"

    def toml(self) -> str:
        node = {
            "id": self.name,
            "role": self.role,
            "log_level": "debug",
            "log_format": "text",
            "admin_socket": str(self.admin),
            **self.node,
        }
        if self.role == "decode":
            node["when_no_prefill"] = self.policy
        tables: list[tuple[str, Mapping[str, object]]] = [
            ("[node]", node),
            ("[model]", {"path": str(self.model), "name": "test-model"}),
            ("[engine]", {"threads": 1, "dtype": "float32", **self.engine}),
            ("[kv]", {"pool_bytes": "256MiB", "page_tokens": 16, **self.kv}),
            ("[fabric]", {"provider": self.provider, "port": self.ports[2], **self.fabric}),
            ("[topology]", self.topology),
            ("[api]", {"listen": f"127.0.0.1:{self.ports[0]}", **self.api}),
            ("[peer]", {"listen": f"{self.link_host}:{self.ports[1]}", **self.peer}),
        ]
        found = [*self.nics] if self.nic is None else [self.nic, *self.nics]
        tables += [("[[fabric.nics]]", nic) for nic in found]
        tables += [
            ("[[prefill]]", {"name": peer.name, "address": f"{peer.link_host}:{peer.ports[1]}"})
            for peer in self.peers
        ]
        lines = ["config_version = 1"]
        for head, keys in tables:
            lines.append(head)
            lines += [
                f"{key} = {msgspec.json.encode(value).decode()}" for key, value in keys.items()
            ]
        return "\n".join(lines) + "\n"


@dataclass(slots=True)
class RunningNode:
    """A started process. Its output is in `log` from byte `begins` on."""

    spec: NodeSpec
    process: subprocess.Popen[bytes]
    log: Path
    begins: int

    def text(self) -> str:
        return self.log.read_bytes()[self.begins :].decode(errors="replace")

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)

    async def ended(self, within_s: float = STOP_TIMEOUT_S) -> int:
        """Exit code, once it ends by itself."""
        await until(lambda: self.process.poll() is not None, f"{self.spec.name} ends", within_s)
        return self.process.wait()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal and wait; SIGKILL when it takes too long (and fail)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.spec.name} did not stop:\n{self.text()}") from None

    def children(self) -> list[int]:
        """Process ids of its workers."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


def start_node(spec: NodeSpec) -> RunningNode:
    config = spec.folder / f"{spec.name}.toml"
    config.write_text(spec.toml())
    log = spec.folder / f"{spec.name}.log"
    program = (
        ["-m", "pdnode"] if spec.protocol is None else ["-c", _SPEAKING, *map(str, spec.protocol)]
    )
    command = [sys.executable, *program, "serve", "--config", str(config)]
    if spec.provider == "tcp-rdm":
        command.append("--allow-test-provider")
    if spec.netns:
        command = ["ip", "netns", "exec", spec.netns, *command]
    with log.open("ab") as sink:
        begins = sink.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"} | dict(spec.env),
        )
    return RunningNode(spec, process, log, begins)


@contextlib.contextmanager
def nodes(*specs: NodeSpec) -> Iterator[list[RunningNode]]:
    """Starts all at once; stops what still runs at the end."""
    running = [start_node(spec) for spec in specs]
    try:
        yield running
    finally:
        for node in running:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGCONT)
                node.process.terminate()
        for node in running:
            try:
                node.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()


@dataclass(slots=True)
class Client:
    """An HTTP client of one node."""

    session: aiohttp.ClientSession
    spec: NodeSpec

    async def wait_ready(self, node: RunningNode, *, status: int = 200) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        seen = ""
        while time.monotonic() < deadline:
            assert node.process.poll() is None, f"{node.spec.name} ended:\n{node.text()}"
            with contextlib.suppress(aiohttp.ClientError):
                async with self.session.get(f"{self.spec.url}/readyz") as answer:
                    seen = await answer.text()
                    if answer.status == status:
                        return
            await _pause()
        raise AssertionError(f"{node.spec.name} not at {status}: {seen}\n{node.text()}")

    async def ready(self) -> tuple[int, list[str]]:
        """Status of /readyz, and the texts of its warnings that keep the node from being ready."""
        async with self.session.get(f"{self.spec.url}/readyz") as answer:
            shown = await answer.json()
        return answer.status, [one["text"] for one in shown if one["affects_readiness"]]

    async def complete(
        self, prompt: list[int] | str, max_tokens: int, **fields: object
    ) -> dict[str, object]:
        """A greedy completion that ignores end-of-text; the decoded body, which must be a 200."""
        status, body, _ = await self.post(prompt, max_tokens, **fields)
        assert status == 200, body
        return body

    async def post(
        self, prompt: list[int] | str, max_tokens: int, **fields: object
    ) -> tuple[int, dict[str, object], Mapping[str, str]]:
        request = _completion(prompt, max_tokens, **fields)
        async with self.session.post(f"{self.spec.url}/v1/completions", json=request) as answer:
            return answer.status, await answer.json(), answer.headers.copy()

    async def tokens(self, prompt: list[int] | str, max_tokens: int) -> list[int]:
        """The greedy tokens that follow `prompt`."""
        body = await self.complete(prompt, max_tokens, return_token_ids=True)
        return body["choices"][0]["token_ids"]

    async def events(
        self, prompt: list[int] | str, max_tokens: int, **fields: object
    ) -> AsyncIterator[dict[str, object]]:
        """The events of a greedy stream, up to `[DONE]` or the end of the connection."""
        request = _completion(prompt, max_tokens, stream=True, return_token_ids=True, **fields)
        async with self.session.post(f"{self.spec.url}/v1/completions", json=request) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield msgspec.json.decode(data)

    async def metrics(self) -> dict[str, float]:
        """Samples by their full name, labels included."""
        async with self.session.get(f"{self.spec.url}/metrics") as answer:
            text = await answer.text()
        found = re.findall(r"^([a-zA-Z_:][^ ]*(?:\{.*\})?) ([0-9.e+-]+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def pages(self) -> dict[str, int]:
        """KV pages by state."""
        pattern = re.compile(r'pdnode_kv_pages\{state="(\w+)"\}')
        return {
            match[1]: int(value)
            for name, value in (await self.metrics()).items()
            if (match := pattern.fullmatch(name))
        }

    async def wait_transfers(self, count: int) -> None:
        """At least `count` KV transfers are under way."""
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            while (await self.metrics())["pdnode_kv_transfers_inflight"] < count:
                await asyncio.sleep(0.01)

    async def wait_no_pages(self, within_s: float = 20.0) -> None:
        """Every page is free again."""
        deadline = time.monotonic() + within_s
        pages: dict[str, int] = {}
        while time.monotonic() < deadline:
            pages = await self.pages()
            if pages and all(count == 0 for state, count in pages.items() if state != "free"):
                return
            await _pause()
        raise AssertionError(f"{self.spec.name} holds pages: {pages}")


@contextlib.asynccontextmanager
async def clients(*specs: NodeSpec):  # noqa: ANN201
    """One client per node."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield [Client(session, spec) for spec in specs]


async def records(spec: NodeSpec, what: str, kind: type[Record]) -> list[Record]:
    """`requests` or `transfers` of a node's admin socket."""
    connector = aiohttp.UnixConnector(str(spec.admin))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(f"http://node/admin/v1/{what}") as answer,
    ):
        return msgspec.json.decode(await answer.read(), type=list[kind])  # type: ignore[valid-type]


async def transfers(spec: NodeSpec) -> list[TransferRecord]:
    return await records(spec, "transfers", TransferRecord)


async def requests(spec: NodeSpec) -> list[RequestRecord]:
    return await records(spec, "requests", RequestRecord)


async def until(done: Callable[[], bool], what: str, within_s: float = EVENT_TIMEOUT_S) -> None:
    """Returns once `done` says so."""
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        await _pause()


def alive(pid: int) -> bool:
    """Whether the process exists and is not merely waiting to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


@contextlib.asynccontextmanager
async def cluster(*specs: NodeSpec) -> AsyncIterator[tuple[list[RunningNode], list[Client]]]:
    """Starts all at once, waits until each is ready; stops what still runs at the end."""
    with nodes(*specs) as running:
        async with clients(*specs) as found:
            for client, node in zip(found, running, strict=True):
                await client.wait_ready(node)
            yield running, found


def _completion(prompt: list[int] | str, max_tokens: int, **fields: object) -> dict[str, object]:
    """Body of a greedy request that ignores end-of-text."""
    return {
        "model": "test-model",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


async def _pause() -> None:
    await asyncio.sleep(0.05)
