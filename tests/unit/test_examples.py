"""The configurations in examples/ are valid and fit together."""

import re
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


def test_one_prefill_node_and_three_decode_nodes_fit_together() -> None:
    prefill = example("1p3d/prefill.toml")
    decodes = [example(f"1p3d/decode-{number}.toml") for number in (1, 2, 3)]
    assert prefill.node.role == "prefill"
    assert len({config.node.id for config in (prefill, *decodes)}) == 4
    assert len({config.api.host for config in (prefill, *decodes)}) == 4
    for decode in decodes:
        [peer] = decode.prefill
        assert decode.node.role == "decode"
        assert (peer.name, peer.host, peer.port) == (
            prefill.node.id, prefill.peer.host, prefill.peer.port,
        )  # fmt: skip
        assert decode.model == prefill.model
        assert decode.kv == prefill.kv
        assert decode.peer.token_credential == prefill.peer.token_credential
        assert [nic.address for nic in decode.fabric.nics] == [decode.api.host]


def test_the_fronts_name_these_decode_nodes() -> None:
    hosts = {example(f"1p3d/decode-{number}.toml").api.host for number in (1, 2, 3)}
    for front in ("nginx.conf", "haproxy.cfg"):
        named = re.findall(
            r"server (?:decode-\d )?([\d.]+):8000", (EXAMPLES / "front" / front).read_text()
        )
        assert set(named) == hosts
        assert len(named) == 3
