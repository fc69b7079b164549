"""The configurations in examples/ are valid and fit together."""

import tomllib
from pathlib import Path

from pdnode.config import Config
from pdnode.configparse import parse

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> Config:
    parsed = parse(tomllib.loads((EXAMPLES / name).read_text()))
    assert isinstance(parsed, Config), parsed
    return parsed


def test_the_pair_fits_together() -> None:
    prefill, decode = example("prefill.toml"), example("decode.toml")
    assert (prefill.node.role, decode.node.role) == ("prefill", "decode")
    peer = decode.prefill[0]
    assert (peer.name, peer.host, peer.port) == (
        prefill.node.id,
        prefill.peer.host,
        prefill.peer.port,
    )
    used = [prefill.api.port, decode.api.port, prefill.peer.port, prefill.fabric.port]
    assert len(set(used)) == len(used)
    assert prefill.node.admin_socket != decode.node.admin_socket
    assert prefill.model == decode.model
