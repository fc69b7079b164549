"""A node that cannot start says why, naming the key, and exits with the code that fits."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdnode.localnodes import free_ports
from tests.support.nodes import NodeSpec, RunningNode, clients, start_node

START_S = 30


def failed(spec: NodeSpec, text: str | None = None) -> tuple[int, str]:
    """Exit code and words of a start that must fail. `text`: the file, if not the spec's own."""
    if text is None:
        node = start_node(spec)
        try:
            return node.process.wait(START_S), node.text()
        finally:
            node.process.kill()
    path = spec.folder / "bad.toml"
    path.write_text(text)
    command = [sys.executable, "-m", "pdnode", "serve", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    return done.returncode, done.stderr


def test_all_problems_of_a_file_at_once(tmp_path: Path, tiny_model: Path) -> None:
    spec = NodeSpec(
        "bad",
        "decode",
        tmp_path / "nowhere",
        tmp_path,
        (NodeSpec("pf", "prefill", tiny_model, tmp_path),),
        engine={"chunk_tokns": 64, "max_running": "many"},
        kv={"page_tokens": 0},
    )
    code, text = failed(spec)
    assert code == 78
    assert "engine.chunk_tokns" in text
    assert "chunk_tokens" in text
    assert "engine.max_running" in text
    assert "kv.page_tokens" in text
    assert str(tmp_path / "nowhere") in text
    assert "Traceback" not in text


def test_a_model_without_weights(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "model.safetensors").unlink()
    code, text = failed(NodeSpec("co", "colocated", model, tmp_path))
    assert code == 78, text
    assert "model.safetensors" in text
    assert "Traceback" not in text


def test_a_model_that_cannot_be_cut(tmp_path: Path, tiny_model: Path) -> None:
    """Four query heads, two KV heads."""
    code, text = failed(NodeSpec("co", "colocated", tiny_model, tmp_path, engine={"tp": 3}))
    assert code == 78, text
    assert "engine.tp: attention heads 4 is no multiple of 3" in text
    assert "engine.tp: 2 KV heads can be neither cut nor copied over 3 ranks" in text
    assert "Traceback" not in text


def test_a_model_of_another_architecture(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("LlamaForCausalLM", "MambaForCausalLM"))
    code, text = failed(NodeSpec("co", "colocated", model, tmp_path))
    assert code == 78, text
    assert "architectures: ['MambaForCausalLM'] is not supported; allowed: LlamaForCausalLM" in text
    assert "Traceback" not in text


def test_a_provider_that_is_absent(tmp_path: Path, tiny_model: Path) -> None:
    """Never another provider instead."""
    spec = NodeSpec("pf", "prefill", tiny_model, tmp_path, provider="verbs")
    nic = '[[fabric.nics]]\nname = "lo"\naddress = "127.0.0.1"\n'
    code, text = failed(spec, spec.toml() + nic)
    assert code in (71, 78), text
    assert "verbs" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("role", "taken", "key"),
    [("colocated", 0, "api.listen"), ("prefill", 1, "peer.listen"), ("prefill", 2, "fabric.port")],
)
async def test_a_port_that_is_taken(
    trio: list[RunningNode], tmp_path: Path, tiny_model: Path, role: str, taken: int, key: str
) -> None:
    """By another node, which goes on undisturbed."""
    other = trio[0]
    async with clients(other.spec) as (client,):
        await client.wait_ready(other)
        ports = free_ports(3)
        ports[taken] = other.spec.ports[taken]
        code, text = failed(NodeSpec("new", role, tiny_model, tmp_path, ports=ports))
        assert code == 78, text
        assert key in text
        assert str(ports[taken]) in text
        assert "Traceback" not in text
        assert (await client.ready())[0] == 200


async def test_an_admin_socket_in_use(
    trio: list[RunningNode], tmp_path: Path, tiny_model: Path
) -> None:
    """A second node must not take the socket of a running one away from it."""
    other = trio[0].spec
    spec = NodeSpec(
        "new", "colocated", tiny_model, tmp_path, node={"admin_socket": str(other.admin)}
    )
    async with clients(other) as (client,):
        await client.wait_ready(trio[0])
        code, text = failed(spec)
        assert code == 78, text
        assert "node.admin_socket" in text
        assert other.admin.is_socket()
