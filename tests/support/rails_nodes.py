"""A prefill node in the namespace and a decode node here, over all rails."""

from pathlib import Path

from pdnode.bench.network import Rails
from tests.support.nodes import NodeSpec


def pair_of(
    model: Path, folder: Path, hosts: Rails, **changes: object
) -> tuple[NodeSpec, NodeSpec]:
    """Prefill and decode node; `changes` go to `[peer]`."""
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    peer = {
        "token_credential": str(token),
        "stall_s": 1.0,
        "link_lost_s": 30.0,
        "connect_timeout_s": 2.0,
        "nic_retry_s": 1.0,
        "nic_retry_max_s": 2.0,
        "verify": "twice",
        **changes,
    }
    kv = {"page_tokens": 32}
    prefill = NodeSpec(
        "pf", "prefill", model, folder, peer=peer, kv=kv, nics=hosts.nics_there,
        link_host=hosts.link.address_there, netns=hosts.netns,
    )  # fmt: skip
    decode = NodeSpec(
        "dc", "decode", model, folder, (prefill,), policy="refuse", peer=peer, kv=kv,
        nics=hosts.nics_here,
    )  # fmt: skip
    return prefill, decode
