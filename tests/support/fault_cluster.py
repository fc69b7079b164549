"""A cluster of hosts under load, the faults that happen to it, and what is promised of each.

Set-ups: two decode nodes, and one prefill node with the policy `local`, one with `refuse`, or two.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.support.fault_load import Asked, ask
from tests.support.hosts import Host, hosts
from tests.support.nodes import Client, NodeSpec, RunningNode, nodes, start_node, until
from tests.support.reference import Case

DECODES = ("d0", "d1")
LINK_LOST_S, FREEZE_S, PARTITION_S = 2.0, 6.0, 10.0
DEAD_S = 3.0  # a killed process stays away for so long, where it does not come back at once
REQUEST_STALL_S = 6.0
PAGE_TOKENS = 16
CANARIES = 8
DISCONNECTS, LEAVERS = 200, 8  # in all, and at a time
LEAVES_WITHIN_S = 0.6
JOINED_WITHIN_S = 90.0  # a process starts on a busy machine
FILLED_WITHIN_S = 300.0  # a real model on a busy machine
REST_WITHIN_S = 30.0
SETTLE_LOOKS = 10

PEER = {
    "link_lost_s": LINK_LOST_S,
    "stall_s": LINK_LOST_S,
    "connect_timeout_s": 2.0,
    "reconnect_max_s": 1.0,
    "request_stall_s": REQUEST_STALL_S,
    "drained_timeout_s": 5.0,
}


@dataclass(frozen=True, slots=True)
class SetUp:
    name: str
    prefills: int
    policy: str

    @property
    def helps_itself(self) -> bool:
        """A request that loses its prefill node has another way."""
        return self.prefills > 1 or self.policy == "local"


SET_UPS = {one.name: one for one in (
    SetUp("local", 1, "local"), SetUp("refuse", 1, "refuse"), SetUp("two", 2, "refuse"),
)}  # fmt: skip


@dataclass(slots=True, eq=False)
class Cluster:
    """`base`: descriptors of each process at rest."""

    set_up: SetUp
    at: dict[str, Host]
    running: dict[str, RunningNode]
    clients: dict[str, Client]
    cases: list[Case] = field(default_factory=list)
    base: dict[str, int] = field(default_factory=dict)

    @property
    def decodes(self) -> list[Client]:
        return [self.clients[name] for name in DECODES]

    def kill(self, name: str) -> None:
        self.running[name].kill()
        del self.base[name]

    def restart(self, name: str) -> None:
        self.running[name] = start_node(self.running[name].spec)

    async def joined(self) -> None:
        """Every node is ready, and every decode node has a session with every prefill node."""
        for name, client in self.clients.items():
            await client.wait_ready(self.running[name])
        for client in self.decodes:
            async with asyncio.timeout(JOINED_WITHIN_S):
                while not await self._has_all(client):
                    await asyncio.sleep(0.1)

    async def _has_all(self, client: Client) -> bool:
        metrics = await client.metrics()
        up = [value for name, value in metrics.items() if name.startswith("pdnode_peer_up")]
        return up == [1.0] * self.set_up.prefills

    async def at_rest(self) -> None:
        """Nothing is under way any more: the pages are back, and the descriptors."""
        for name, client in self.clients.items():
            await client.wait_no_pages(REST_WITHIN_S)
            process = self.running[name].process.pid
            if name not in self.base:
                self.base[name] = await least_descriptors(process)
            base = self.base[name]
            deadline = time.monotonic() + REST_WITHIN_S
            while len(found := descriptors(process)) != base:
                assert time.monotonic() < deadline, f"{name} had {base} descriptors: {found}"
                await asyncio.sleep(0.1)

    async def prompts_fill_the_pool(self) -> None:
        """Prompts of as many tokens as each pool holds come in: pages find new owners."""
        for client in self.decodes:
            pool = sum((await client.pages()).values()) * PAGE_TOKENS
            wanted = await _prompt_tokens(client) + pool
            async with asyncio.timeout(FILLED_WITHIN_S):
                while await _prompt_tokens(client) < wanted:
                    await asyncio.sleep(0.1)

    async def pages_verified(self) -> dict[str, float]:
        """By decode node, since its start: how often a page was compared with its digests."""
        found = {}
        for client in self.decodes:
            metrics = await client.metrics()
            wrong = {n: v for n, v in metrics.items() if n.startswith("pdnode_kv_mismatches") and v}
            assert not wrong, (client.spec.name, wrong)
            found[client.spec.name] = sum(
                metrics.get(f'pdnode_kv_pages_verified_total{{when="{when}"}}', 0.0)
                for when in ("completion", "release")
            )
        return found


async def _prompt_tokens(client: Client) -> float:
    """Of requests that the node has admitted since its start."""
    name = "vllm:prompt_tokens_total"
    return sum(
        value for sample, value in (await client.metrics()).items() if sample.startswith(name)
    )


def descriptors(process: int) -> list[str]:
    """What the descriptors of a process are."""
    folder = Path(f"/proc/{process}/fd")
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(folder / name))
    return sorted(found)


async def least_descriptors(process: int) -> int:
    """How many there are once the connections of the last requests are closed."""
    found = []
    for _ in range(SETTLE_LOOKS):
        found.append(len(descriptors(process)))
        await asyncio.sleep(0.1)
    return min(found)


# Faults. Each returns once what was broken is mended; the rest heals by itself.


async def kill_prefill(cluster: Cluster) -> None:
    cluster.kill("p0")
    await asyncio.sleep(DEAD_S)
    cluster.restart("p0")


async def restart_prefill(cluster: Cluster) -> None:
    """It is back on the same address before anybody has missed it."""
    cluster.kill("p0")
    cluster.restart("p0")


async def freeze_prefill(cluster: Cluster) -> None:
    """Given up, fenced, its pages given to others, then it wakes up."""
    frozen = cluster.running["p0"]
    sessions, fenced = (
        {name: cluster.running[name].text().count(event) for name in DECODES}
        for event in ("session.up", "session.fenced")
    )
    frozen.send_signal(signal.SIGSTOP)
    await asyncio.sleep(FREEZE_S)
    for name, fences in fenced.items():
        assert cluster.running[name].text().count("session.fenced") > fences
    if cluster.set_up.helps_itself:
        await cluster.prompts_fill_the_pool()
    frozen.send_signal(signal.SIGCONT)
    for name, before in sessions.items():
        node = cluster.running[name]
        await until(
            lambda node=node, before=before: node.text().count("session.up") > before,  # type: ignore[misc]
            f"{name} has heard hello again",
            JOINED_WITHIN_S,
        )


async def kill_decode(cluster: Cluster) -> None:
    cluster.kill("d1")
    await asyncio.sleep(DEAD_S)
    cluster.restart("d1")


def cut(*networks: str) -> Callable[[Cluster], Awaitable[None]]:
    async def cut_and_mend(cluster: Cluster) -> None:
        host = cluster.at["p0"]
        host.cut(*networks)
        await asyncio.sleep(PARTITION_S)
        host.mend(*networks)

    return cut_and_mend


async def disconnect(cluster: Cluster) -> None:
    """Clients that leave: in the queue, in prefill, in decode."""
    left = iter(range(DISCONNECTS))

    async def leave() -> None:
        for number in left:
            draw = random.Random(number)
            client, case = draw.choice(cluster.decodes), draw.choice(cluster.cases)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(draw.uniform(0.0, LEAVES_WITHIN_S)):
                    await ask(client, Asked(client.spec.name, case, time.monotonic()))

    await asyncio.gather(*(leave() for _ in range(LEAVERS)))


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    happens: Callable[[Cluster], Awaitable[None]]
    hits: str  # prefill | decode | nobody: whose requests may suffer


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("SIGSTOP, SIGCONT of prefill", freeze_prefill, "prefill"),
        Fault("SIGKILL of prefill", kill_prefill, "prefill"),
        Fault("link down, fabric up", cut("link"), "prefill"),
        Fault("partition", cut("link", "fabric"), "prefill"),
        Fault("fabric down, link up", cut("fabric"), "prefill"),
        Fault("SIGKILL of decode", kill_decode, "decode"),
        Fault("restart on the same address", restart_prefill, "prefill"),
        Fault("200 disconnects", disconnect, "nobody"),
    )
}


# The cluster


def specs(
    set_up: SetUp, model: Path, folder: Path, at: dict[str, Host], pool_bytes: str
) -> list[NodeSpec]:
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    kv = {"pool_bytes": pool_bytes, "page_tokens": PAGE_TOKENS}
    peer = {"token_credential": str(token), **PEER}

    def spec(name: str, role: str, peers: tuple[NodeSpec, ...] = ()) -> NodeSpec:
        host = at[name]
        decode = role == "decode"
        return NodeSpec(
            name, role, model, folder, peers, set_up.policy,
            engine={"chunk_tokens": 64},
            kv={**kv, "canary_pages": CANARIES} if decode else kv,
            peer={**peer, "verify": "twice"} if decode else peer,
            link_host=host.address("link"),
            nic=host.nic,
            netns=host.netns,
        )  # fmt: skip

    prefills = tuple(spec(f"p{number}", "prefill") for number in range(set_up.prefills))
    return [*prefills, *(spec(name, "decode", prefills) for name in DECODES)]


@contextlib.asynccontextmanager
async def cluster(
    set_up: SetUp, model: Path, folder: Path, *, pool_bytes: str
) -> AsyncIterator[Cluster]:
    """All nodes joined."""
    names = [*(f"p{number}" for number in range(set_up.prefills)), *DECODES]
    async with contextlib.AsyncExitStack() as stack:
        at = stack.enter_context(hosts(*names))
        wanted = specs(set_up, model, folder, at, pool_bytes)
        started = stack.enter_context(nodes(*wanted))
        clients = {}
        for spec in wanted:
            # One connection a request, so that none is left to be counted at rest.
            connector = aiohttp.TCPConnector(
                limit=0, force_close=True, socket_factory=at[spec.name].connector()
            )
            timeout = aiohttp.ClientTimeout(total=600)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout)
            clients[spec.name] = Client(await stack.enter_async_context(session), spec)
        found = Cluster(set_up, at, {node.spec.name: node for node in started}, clients)
        stack.callback(_end, found, started)
        await found.joined()
        yield found


def _end(found: Cluster, started: Sequence[RunningNode]) -> None:
    """Nodes that were started in place of others; `nodes` stops the first ones."""
    for node in found.running.values():
        if node not in started:
            node.stop()
