"""A prefill node in the namespace and a decode node here, over all rails."""

from pathlib import Path

from pdnode.bench.network import Rails
from tests.support.nodes import Client, NodeSpec


def pair_of(
    model: Path, folder: Path, hosts: Rails, *, groups: int = 1, **changes: object
) -> tuple[NodeSpec, NodeSpec]:
    """Prefill and decode node; `changes` go to `[peer]`. `groups`: device groups that the NICs are
    dealt to in order, with a rank each."""
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
    engine = {"tp": groups}
    prefill = NodeSpec(
        "pf", "prefill", model, folder, peer=peer, kv=kv, engine=engine,
        nics=_grouped(hosts.nics_there, groups),
        link_host=hosts.link.address_there, netns=hosts.netns,
    )  # fmt: skip
    decode = NodeSpec(
        "dc", "decode", model, folder, (prefill,), policy="refuse", peer=peer, kv=kv,
        engine=engine, nics=_grouped(hosts.nics_here, groups),
    )  # fmt: skip
    return prefill, decode


def _grouped(nics: list[dict[str, object]], groups: int) -> list[dict[str, object]]:
    return [{**nic, "group": number * groups // len(nics)} for number, nic in enumerate(nics)]


async def ask(client: Client, prompt: list[int]) -> list[int]:
    """Tokens of an answer whose prompt the prefill node has computed."""
    status, body, headers = await client.post(prompt, 8, return_token_ids=True)
    assert status == 200, body
    assert headers["X-Pdnode-Prefill"] == "pf"
    tokens: list[int] = body["choices"][0]["token_ids"]
    return tokens
