"""The decode node's wait for the transfer is what the core's record of the layers says.

The wire carries 20 Mbit/s, so the pages take many times as long as the passes and the wait is
seconds. The nodes share one monotonic clock, as they never do in use; only this test compares it.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.admin import Admin, admin_of
from tests.support.nodes import READY_TIMEOUT_S, NodeSpec, nodes, requests, transfers, until
from tests.support.prompts import random_prompt
from tests.support.tiny_model import write_tiny_llama
from tests.support.wire import NO_NAMESPACES, Wire, on_wire, veth_pair

LAYERS = 16
KV_BYTES = LAYERS * 4 * 2 * 16 * 4  # of a token: heads, K and V, head size, float32
RATE = 20_000_000 / 8
TOLERANCE_S = 0.25
"""From the last byte to the event loop that notes it, and from a raise to the end of its pass, on a
machine that does other things as well."""

pytestmark = [
    pytest.mark.skipif(
        NO_NAMESPACES or shutil.which("tc") is None, reason="a slow wire needs root, ip and tc"
    ),
    pytest.mark.timeout(300),
]


@pytest.fixture
def wire() -> Iterator[Wire]:
    with veth_pair("wait") as found:
        yield found


def slow(wire: Wire) -> bool:
    """What the prefill node sends is held to the rate; False where the kernel cannot."""
    shape = ["root", "tbf", "rate", "20mbit", "burst", "128kb", "latency", "2s"]
    namespace, device = wire.namespaces[1], wire.devices[1]
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, *shape]
    return subprocess.run(command, timeout=10, capture_output=True, check=False).returncode == 0


async def ask(spec: NodeSpec, admin: Admin, prompt: list[int]) -> None:
    """A request from inside the namespace, to its end, `drained` included."""
    body = f'{{"model":"test-model","prompt":{prompt},"max_tokens":64,"ignore_eos":true}}'
    done = subprocess.run(
        ["ip", "netns", "exec", spec.netns, "curl", "-fsS", "--max-time", "120", "-d", body,
         "-H", "content-type: application/json", f"{spec.url}/v1/completions"],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    await admin.until(lambda seen: seen.transfers_inflight == 0 and seen.requests_open == 0)


async def test_the_wait_for_the_transfer_is_what_the_layers_say(tmp_path: Path, wire: Wire) -> None:
    if not slow(wire):
        pytest.skip("this kernel has no token bucket filter")
    model = write_tiny_llama(tmp_path / "model", layers=LAYERS, kv_heads=4)
    prefill, decode = on_wire(model, tmp_path, wire)
    lengths = (1, 17, 257, 513, 901)
    with nodes(prefill, decode):
        async with admin_of(decode.admin) as admin:
            await until(decode.admin.exists, "the admin socket", READY_TIMEOUT_S)
            await admin.until(lambda seen: seen.ready)
            for number, length in enumerate(lengths):
                await ask(decode, admin, random_prompt(length, seed=number))
        asked = {record.request_id: record for record in await requests(decode)}
        moved = await transfers(prefill)
    assert len(asked) == len(lengths)
    assert len(moved) == len(lengths) - 1  # a prompt of one token needs no transfer
    for transfer in moved:
        request = asked[transfer.request_id]
        raised = max(row.raised_ns for row in transfer.layers)
        after_s = (max(row.done_ns for row in transfer.layers) - raised) / 1e9
        sys.stdout.write(f"{transfer.tokens} tokens: {request.transfer_wait_s}, {after_s} s\n")
        assert request.transfer_wait_s > -1e-3
        assert abs(request.transfer_wait_s - after_s) < TOLERANCE_S, (request, after_s)
    longest = asked[moved[-1].request_id]
    least_s = 900 * KV_BYTES / RATE - longest.prefill_s
    assert longest.transfer_wait_s > 0.9 * least_s > 1.0
