"""Token, API keys and certificates of two real nodes: renewed by a reload, and never shown."""

import re
import subprocess
from pathlib import Path

import pytest

from pdnode.secretfile import read_secret
from tests.support.admin import admin_of, pdnode
from tests.support.certificates import Authority
from tests.support.nodes import Client, NodeSpec, RunningNode, cluster, nodes, requests
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.timeout(240)

PROMPT = random_prompt(100, seed=3)
FIRST, SECOND = "first-0123456789abcdef", "second-0123456789abcdef"


class Secrets:
    """The files of one deployment, all of them for both nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token, self.keys = folder / "token", folder / "keys"
        self.renew(FIRST)

    def renew(self, word: str) -> None:
        """A new token, key and authority, under the same names."""
        for path, kind in ((self.token, "token"), (self.keys, "key")):
            path.touch(mode=0o600)
            path.write_text(f"{kind}-{word}\n")
        Authority(self.folder, "ca").sign("node")

    def peer(self) -> dict[str, object]:
        return {
            "token_credential": str(self.token),
            "tls_certificate": str(self.folder / "node.pem"),
            "tls_key": str(self.folder / "node.key"),
            "tls_ca": str(self.folder / "ca.pem"),
            "reconnect_max_s": 0.3,
        }


async def status(client: Client, word: str) -> int:
    headers = {"Authorization": f"Bearer key-{word}"} if word else {}
    body = {"model": "test-model", "prompt": PROMPT, "max_tokens": 2}
    url = f"{client.spec.url}/v1/completions"
    async with client.session.post(url, json=body, headers=headers) as answer:
        await answer.read()
        return answer.status


async def shown_by(node: RunningNode) -> str:
    """Everything that a node says of itself."""
    async with admin_of(node.spec.admin) as admin:
        answers = [await admin.get(route) for route in ("snapshot", "config", "requests")]
    check = await pdnode(
        "check-config",
        "--print-effective",
        "--config",
        str(node.spec.folder / f"{node.spec.name}.toml"),
    )
    return node.text() + check.out + b"".join(body for _, body in answers).decode()


async def test_secrets_are_renewed_by_a_reload(tiny_model: Path, tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    prefill = NodeSpec("pf", "prefill", tiny_model, tmp_path, peer=secrets.peer())
    decode = NodeSpec("dc", "decode", tiny_model, tmp_path, (prefill,), peer=secrets.peer())
    decode.api = {"keys_credential": str(secrets.keys)}
    async with cluster(prefill, decode) as (running, (_, d)):
        assert [await status(d, word) for word in ("", SECOND, FIRST)] == [401, 401, 200]
        assert (await requests(decode))[-1].prefill == "pf"

        secrets.renew(SECOND)
        for node, said in (
            (running[0], "peer.token_credential, peer.tls_certificate"),
            (running[1], "peer.token_credential, peer.tls_certificate, api.keys_credential"),
        ):
            ran = await pdnode("reload", "--socket", str(node.spec.admin))
            assert (ran.code, ran.out) == (0, f"reloaded: {said}\n")
        # The link that is up stays; requests want the new key at once.
        assert [await status(d, word) for word in (FIRST, SECOND)] == [401, 200]
        assert running[1].text().count("session.up") == 1

        assert running[0].stop() == 0  # the next link is made with what is new on both sides
        await d.wait_ready(running[1], status=503)
        with nodes(prefill) as (again,):
            await d.wait_ready(running[1])
            assert await status(d, SECOND) == 200
            assert (await requests(decode))[-1].prefill == "pf"
            shown = await shown_by(again) + await shown_by(running[1])
    private = (tmp_path / "node.key").read_text().splitlines()[1]
    for secret in (FIRST, SECOND, private):
        assert secret not in shown


def test_a_token_as_the_threat_model_makes_it(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "THREAT_MODEL.md").read_text()
    [command] = re.findall(r"`(openssl rand [^`]+)`", text)
    made = subprocess.run(command.split(), capture_output=True, check=True, timeout=30).stdout
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_bytes(made)
    assert read_secret(str(path)) == made.strip()
    assert len(bytes.fromhex(made.decode())) == 32
