"""The console in tmux over real nodes: what it shows is what the kernel counts, what it tells them
is done, and it outlives them."""

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pdnode_tui.units import gbits

from pdnode.obs.snapshot import Nic, decode
from tests.support.admin import Admin, admin_of, pdnode
from tests.support.nodes import READY_TIMEOUT_S, NodeSpec, clients, nodes, until
from tests.support.tiny_model import write_tiny_llama
from tests.support.tmux import MISSING, Tmux
from tests.support.wire import NO_NAMESPACES, Wire, on_wire, veth_pair

SECONDS = 10
STREAMS = 16

pytestmark = [
    pytest.mark.skipif(MISSING, reason="needs tmux"),
    pytest.mark.timeout(300),
]


def console(spec: NodeSpec, *, width: int = 100, height: int = 30) -> Tmux:
    command = [sys.executable, "-m", "pdnode", "top", "--socket", str(spec.admin)]
    return Tmux(command, width=width, height=height)


def shows(*parts: str) -> Callable[[list[str]], bool]:
    """A condition for `Tmux.until`: all of `parts`, as patterns, are on the screen."""
    return lambda lines: all(re.search(part, "\n".join(lines)) for part in parts)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with veth_pair("top") as found:
        yield found


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Little to compute and 8 KiB of KV a token: the wire has something to carry."""
    return write_tiny_llama(tmp_path_factory.mktemp("wide"), layers=16, kv_heads=4)


@contextlib.contextmanager
def load(spec: NodeSpec) -> Iterator[None]:
    """`pdnode bench serve` beside the decode node, until the end."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", spec.netns, sys.executable, "-m", "pdnode", "bench", "serve",
         "--url", spec.url, "--streams", str(STREAMS), "--prompt-tokens", "900",
         "--output-tokens", "4", "--requests", "100000", "--duration", "600"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


async def next_sample(admin: Admin, wire: Wire) -> tuple[int, float, Nic]:
    """When the daemon has looked at its counters again: the kernel's, the time, and the rates."""
    before = (await admin.snapshot()).nics[0].rx_history
    nic = (await admin.until(lambda seen: seen.nics[0].rx_history != before)).nics[0]
    return wire.received_bytes(), time.monotonic(), nic


async def rate_ratio(admin: Admin, wire: Wire) -> float:
    """The daemon's rates over what the kernel has counted meanwhile."""
    began_bytes, began, _ = await next_sample(admin, wire)
    rates = []
    for _ in range(SECONDS):
        ended_bytes, ended, nic = await next_sample(admin, wire)
        rates.append(nic.rx_history[-1])
    counted = (ended_bytes - began_bytes) / (ended - began)
    return sum(rates) / len(rates) / counted


@pytest.mark.skipif(NO_NAMESPACES, reason="network namespaces need root and ip")
async def test_rates_agree_with_the_kernel_and_pages_are_seen_in_flight(
    wide_model: Path, tmp_path: Path, wire: Wire
) -> None:
    specs = on_wire(wide_model, tmp_path, wire)
    with nodes(*specs):
        async with admin_of(specs[1].admin) as admin:
            await until(specs[1].admin.exists, "the admin socket", READY_TIMEOUT_S)
            await admin.until(lambda seen: seen.ready)
            with load(specs[1]), console(specs[1]) as top:
                device = wire.devices[0]
                rate = rf"│ {device} .*? (\d+\.\d+|\d+) +[\d.]+ "
                await asyncio.to_thread(
                    top.until, shows(r"KV IN FLIGHT +\d+ xfers", r" pf +899 █.* \d+% prefill", rate)
                )
                # The daemon and this test look at the counters some ms apart, and on a busy machine
                # some more: the first of three windows that agrees is enough.
                ratios = [await rate_ratio(admin, wire)]
                while len(ratios) < 3 and abs(ratios[-1] - 1) >= 0.05:
                    ratios.append(await rate_ratio(admin, wire))
                assert abs(ratios[-1] - 1) < 0.05, ratios
                shown = re.search(rate, "\n".join(top.screen()))
                history = (await admin.snapshot()).nics[0].rx_history
                assert shown is not None
                assert shown[1] in {gbits(one) for one in history[-15:]}
                top.resize(80, 24)
                small = await asyncio.to_thread(
                    top.until,
                    shows(r"KV IN FLIGHT +\d+ xfers", rf"rx .*{device}.* [\d.]+", "PEERS"),
                )
                assert len(small) == 24
                assert max(map(len, small)) <= 80
                ran = await pdnode("top", "--socket", str(specs[1].admin), "--once", "--json")
                assert decode(ran.out).nics[0].name == device


async def test_it_outlives_the_daemon_and_notes_the_next_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    spec = NodeSpec("co", "colocated", tiny_model, tmp_path)
    with contextlib.ExitStack() as stack:
        [node] = stack.enter_context(nodes(spec))
        await until(spec.admin.exists, "the admin socket", READY_TIMEOUT_S)
        top = stack.enter_context(console(spec))
        await asyncio.to_thread(top.until, shows("● serving"))
        boot = await boot_of(spec)
        node.kill()
        stale = await asyncio.to_thread(top.until, shows(r"STALE [\d.]+m?s +reconnecting in"))
        assert "co  COLOCATED" in stale[0]  # the last picture stays
        assert "D drain" not in "\n".join(stale)
        top.press("D")
        await asyncio.to_thread(top.until, shows("no connection"))
        stack.enter_context(nodes(spec))
        await asyncio.to_thread(
            top.until, shows("● (serving|loading)", "co was restarted: new boot")
        )
        assert await boot_of(spec) != boot
        await asyncio.to_thread(top.until, shows("● serving"))
        top.press("Escape")
        await asyncio.to_thread(top.until, shows("D drain"))


async def test_cancel_and_drain_are_done_and_the_answer_is_shown(
    tiny_model: Path, tmp_path: Path
) -> None:
    spec = NodeSpec("co", "colocated", tiny_model, tmp_path)
    with nodes(spec) as [node]:
        async with clients(spec) as [client], admin_of(spec.admin) as admin:
            await client.wait_ready(node)
            with console(spec) as top:
                asked = asyncio.create_task(client.post([1, 2, 3], 2000))
                [request] = (await admin.until(lambda seen: len(seen.requests) == 1)).requests
                await asyncio.to_thread(top.until, shows(rf"> ?{request.request_id[:6]}"))
                top.press("X")
                await asyncio.to_thread(top.until, shows(r"cancel request .*\?"))
                top.press("y")
                await asyncio.to_thread(top.until, shows(": cancelled while running"))
                assert (await asked)[0] == 499
                top.press("D")
                await asyncio.to_thread(top.until, shows(r"drain co\? .*Type the node's name"))
                top.press("co", "Enter")
                await asyncio.to_thread(
                    top.until, shows("● draining", "W102", "draining: 0 requests")
                )
                assert (await client.post([1, 2, 3], 1))[0] == 503
                top.press("D")
                await asyncio.to_thread(top.until, shows(r"undrain co\?"))
                top.press("co", "Enter")
                await asyncio.to_thread(top.until, shows("takes work again", "● serving"))
                assert (await client.post([1, 2, 3], 1))[0] == 200


async def boot_of(spec: NodeSpec) -> str:
    async with admin_of(spec.admin) as admin:
        return (await admin.snapshot()).node.boot
