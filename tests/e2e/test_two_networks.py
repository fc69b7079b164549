"""Link and fabric are two networks: the fabric dies while the link lives, and comes back.

The prefill node runs in a network namespace, joined by two veth pairs. A dead interface is no
error for the provider, so only the sender's own watch (`stall_s`) can end the wait.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.nodes import Client, NodeSpec, clients, nodes, until
from tests.support.prompts import random_prompt

STALL_S = 1.0

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"
)


@dataclass(frozen=True, slots=True)
class Networks:
    """A namespace and the two networks to it; `here` and `there` are this side's and its ends."""

    netns: str
    link_here: str
    link_there: str
    fabric_device: str
    fabric_here: str
    fabric_there: str

    def fabric(self, state: str) -> None:
        ip("link", "set", self.fabric_device, state)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10)


@pytest.fixture
def networks() -> Iterator[Networks]:
    number = os.getpid() % 10_000
    netns = f"pdnode-{number}"
    devices = (f"pdl{number}", f"pdf{number}")
    octet = number % 250
    ip("netns", "add", netns)
    try:
        ip("-n", netns, "link", "set", "lo", "up")
        for place, device in enumerate(devices):
            far = f"{device}p"
            ip("link", "add", device, "type", "veth", "peer", "name", far, "netns", netns)
            ip("address", "add", f"10.{77 + place}.{octet}.1/30", "dev", device)
            ip("-n", netns, "address", "add", f"10.{77 + place}.{octet}.2/30", "dev", far)
            ip("link", "set", device, "up")
            ip("-n", netns, "link", "set", far, "up")
        yield Networks(
            netns,
            f"10.77.{octet}.1",
            f"10.77.{octet}.2",
            devices[1],
            f"10.78.{octet}.1",
            f"10.78.{octet}.2",
        )
    finally:
        ip("netns", "delete", netns)


def specs(model: Path, folder: Path, networks: Networks) -> tuple[NodeSpec, NodeSpec]:
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    peer = {"token_credential": str(token), "stall_s": STALL_S, "connect_timeout_s": 1.0}
    prefill = NodeSpec(
        "pf",
        "prefill",
        model,
        folder,
        peer=peer,
        link_host=networks.link_there,
        nic={"name": f"{networks.fabric_device}p", "address": networks.fabric_there},
        netns=networks.netns,
    )
    decode = NodeSpec(
        "dc",
        "decode",
        model,
        folder,
        (prefill,),
        policy="local",
        peer=peer,
        nic={"name": networks.fabric_device, "address": networks.fabric_here},
    )
    return prefill, decode


async def ask(client: Client, prompt: list[int]) -> tuple[list[int], str]:
    """(tokens, who computed the prompt)"""
    status, body, headers = await client.post(prompt, 8, return_token_ids=True)
    assert status == 200, body
    return body["choices"][0]["token_ids"], headers["X-Pdnode-Prefill"]


async def served_by(client: Client, prompt: list[int], name: str) -> list[int]:
    """Asks until `name` computes the prompt; the tokens of that answer."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        tokens, prefill = await ask(client, prompt)
        if prefill == name:
            return tokens
    raise AssertionError(f"{name} never computed the prompt")


async def test_a_dead_fabric_is_noticed_while_the_link_lives(
    tiny_model: Path, tmp_path: Path, networks: Networks
) -> None:
    prompt = random_prompt(200, seed=1)
    with nodes(*specs(tiny_model, tmp_path, networks)) as (prefill, decode):
        async with clients(decode.spec) as (client,):
            await client.wait_ready(decode)
            reference = await served_by(client, prompt, "pf")

            networks.fabric("down")
            began = time.monotonic()
            assert await ask(client, prompt) == (reference, "local")
            # Long before request_stall_s (30 s) and what TCP itself would take.
            assert time.monotonic() - began < 25
            await until(lambda: "nic.stalled" in prefill.text(), "the stall is logged")
            await client.wait_no_pages()

            networks.fabric("up")
            assert await served_by(client, prompt, "pf") == reference
            await client.wait_no_pages()
