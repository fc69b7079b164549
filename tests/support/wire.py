"""A prefill and a decode node in network namespaces of their own, joined by a veth pair."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.nodes import NodeSpec

NO_NAMESPACES = os.geteuid() != 0 or shutil.which("ip") is None


@dataclass(frozen=True, slots=True)
class Wire:
    """A veth pair between two namespaces; addresses and devices of decode and prefill."""

    namespaces: tuple[str, str]
    devices: tuple[str, str]
    addresses: tuple[str, str]

    def received_bytes(self) -> int:
        """What the kernel has counted at the decode node's end."""
        out = ip("-n", self.namespaces[0], "-s", "-j", "link", "show", self.devices[0])
        return int(re.search(r'"rx":\{"bytes":(\d+)', out)[1])  # type: ignore[index]


def ip(*words: str) -> str:
    return subprocess.run(
        ["ip", *words], check=True, timeout=10, capture_output=True, text=True
    ).stdout


@contextlib.contextmanager
def veth_pair(name: str) -> Iterator[Wire]:
    number = os.getpid() % 10_000
    found = Wire(
        (f"pd{name}-d{number}", f"pd{name}-p{number}"),
        (f"d{number}", f"p{number}"),  # short: the console cuts at seven
        (f"10.79.{number % 250}.1", f"10.79.{number % 250}.2"),
    )
    with contextlib.ExitStack() as stack:
        for namespace in found.namespaces:
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "delete", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        (here, there), (near, far) = found.namespaces, found.devices
        ip("-n", here, "link", "add", near, "type", "veth", "peer", "name", far, "netns", there)
        for namespace, device, address in zip(
            found.namespaces, found.devices, found.addresses, strict=True
        ):
            ip("-n", namespace, "address", "add", f"{address}/30", "dev", device)
            ip("-n", namespace, "link", "set", device, "up")
        yield found


def on_wire(model: Path, folder: Path, wire: Wire) -> tuple[NodeSpec, NodeSpec]:
    """(prefill, decode) of a model with at most 8 KiB of KV a token."""
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    peer = {"token_credential": str(token), "link_lost_s": 30.0, "stall_s": 30.0}
    decode_nic, prefill_nic = (
        {"name": device, "address": address}
        for device, address in zip(wire.devices, wire.addresses, strict=True)
    )
    prefill = NodeSpec(
        "pf", "prefill", model, folder, peer=peer, link_host=wire.addresses[1], nic=prefill_nic,
        netns=wire.namespaces[1], kv={"pool_bytes": "512MiB"},
    )  # fmt: skip
    return prefill, NodeSpec(
        "dc", "decode", model, folder, (prefill,), peer=peer, nic=decode_nic,
        netns=wire.namespaces[0], kv={"pool_bytes": "512MiB"},
    )  # fmt: skip
