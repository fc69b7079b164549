"""Which keys a changed file changes, and which of them a running node can take."""

from pathlib import Path

import pytest

from pdnode.configfile import Loaded, load_settings
from pdnode.daemon.reload import can_reload, changed_keys
from tests.support.certificates import Authority

HEAD = """config_version = 1
[node]
id = "n"
role = "decode"
[model]
path = "{model}"
"""
PEER = '[[prefill]]\nname = "pf-1"\naddress = "127.0.0.1:7700"\n'


def load(folder: Path, rest: str) -> Loaded:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    path = folder / "config.toml"
    path.write_text(HEAD.format(model=model) + rest)
    return load_settings(path)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        (PEER, PEER, []),
        (PEER, "[engine]\nmax_waiting = 256\n" + PEER, []),  # the default, now written out
        (PEER, "[engine]\nmax_waiting = 9\n" + PEER, ["engine.max_waiting"]),
        (PEER, PEER.replace("7700", "7701"), ["prefill[0].address"]),
        (
            PEER,
            PEER + PEER.replace("pf-1", "pf-2").replace("7700", "7701"),
            ["prefill[1].name", "prefill[1].address"],
        ),
        (PEER, "", ["prefill[0].name", "prefill[0].address"]),
    ],
)
def test_changed_keys(tmp_path: Path, old: str, new: str, changed: list[str]) -> None:
    before, after = load(tmp_path, old), load(tmp_path, new)
    assert changed_keys(before, after) == changed
    assert all(can_reload(key) for key in changed)


def test_a_token_that_only_its_file_changes_is_a_change(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("one secret that is long enough to be one\n")
    secret.chmod(0o600)
    rest = f'[peer]\ntoken_credential = "{secret}"\n' + PEER
    before = load(tmp_path, rest)
    assert changed_keys(before, load(tmp_path, rest)) == []
    secret.write_text("another secret that is long enough to be one\n")
    assert changed_keys(before, load(tmp_path, rest)) == ["peer.token_credential"]


def test_keys_and_certificates_that_only_their_files_change(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789abcdef\n")
    keys.chmod(0o600)
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.sign("node")
    rest = f'[api]\nkeys_credential = "{keys}"\n[peer]\ntls_certificate = "{certificate}"\n'
    rest += f'tls_key = "{key}"\ntls_ca = "{authority.path}"\n' + PEER
    before = load(tmp_path, rest)
    assert before.config.api.keys == (b"sk-0123456789abcdef",)
    assert changed_keys(before, load(tmp_path, rest)) == []
    keys.write_text("sk-fedcba9876543210\n")
    authority.sign("node")
    assert changed_keys(before, load(tmp_path, rest)) == [
        "peer.tls_certificate",
        "api.keys_credential",
    ]
    shown = repr(before.config) + repr(before.settings)
    assert "0123456789abcdef" not in shown


def test_what_needs_a_restart() -> None:
    for key in ("node.role", "model.path", "kv.page_tokens", "fabric.nics[0].address"):
        assert not can_reload(key)
    for key in ("node.log_level", "api.max_body_bytes", "prefill[63].name"):
        assert can_reload(key)
