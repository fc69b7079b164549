"""The command line as users and units call it: real processes where exit codes matter."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode import __version__, cli
from pdnode.errors import DeviceMissing, EngineDied, Exit, Problem


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    path = tmp_path / "config.toml"
    path.write_text(
        f'config_version = 1\n[node]\nid = "n1"\nrole = "colocated"\n'
        f'admin_socket = "{tmp_path}/admin.sock"\n[model]\npath = "{model}"\n'
        f'[api]\nlisten = "127.0.0.1:0"\n'
    )
    return path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def pdnode(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "PDNODE_CONFIG"}
    return subprocess.run(
        [sys.executable, "-m", "pdnode", *args],
        capture_output=True, text=True, timeout=60, env={**clean, **env}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["srve"], "invalid choice: 'srve'"),
        (["serve"], "--config FILE is required, or PDNODE_CONFIG"),
        (["check-config", "--conf", "x"], "unrecognized arguments: --conf"),
        (["serve", "-h"], "unrecognized arguments: -h"),
        (["demo", "--max-tokens", "0"], "argument --max-tokens: invalid"),
        (["model", "fetch", "gpt"], "invalid choice: 'gpt'"),
        (["serve", "--log-format", "xml"], "invalid choice: 'xml'"),
    ],
)
def test_wrong_usage_exits_with_64(
    args: list[str], part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDNODE_CONFIG", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert part in err


def test_exit_codes_of_processes(config: Path, tmp_path: Path) -> None:
    assert pdnode("nonsense").returncode == 64
    good = pdnode("check-config", PDNODE_CONFIG=str(config))
    assert (good.returncode, good.stdout, good.stderr) == (0, "", f"{config}: valid\n")
    config.write_text(config.read_text().replace('"colocated"', '"both"') + "x = 1\n")
    bad = pdnode("check-config", "--config", str(config))
    assert bad.returncode == 78
    assert bad.stderr.splitlines() == [
        f'{config}:4: node.role: expected one of "prefill", "decode", "colocated", got "both"',
        f"{config}:10: api.x: unknown key; known here: listen, max_body_bytes, max_connections, "
        "keys_credential",
    ]
    assert pdnode("serve", "--config", str(config)).returncode == 78


def test_json_of_check_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["check-config", "--config", str(config), "--json"]
    assert cli.main(args) == 0
    assert json.loads(capsys.readouterr().out) == {
        "valid": True, "problems": [], "warnings": [], "nics": [],
    }  # fmt: skip
    assert cli.main([*args, "--print-effective"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert {"key": "node.id", "value": '"n1"', "origin": "file"} in settings
    assert {"key": "kv.page_tokens", "value": '"auto"', "origin": "default"} in settings
    config.write_text("config_version = 1\n")
    assert cli.main(args) == 78
    found = json.loads(capsys.readouterr().out)
    assert found["valid"] is False
    assert [problem["where"].rpartition(" ")[2] for problem in found["problems"]] == [
        "node.role",
        "model.path",
    ]


def test_print_effective_never_shows_the_secret(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    config.write_text(config.read_text() + f'[peer]\ntoken_credential = "{token}"\n')
    assert cli.main(["check-config", "--config", str(config), "--print-effective"]) == 0
    out, err = capsys.readouterr()
    assert f'peer.token_credential = "{token}"  # file' in out.splitlines()
    assert "engine.chunk_tokens = 512  # default" in out.splitlines()
    assert "0123456789abcdef" not in out + err


def test_host_check_finds_everything_at_once(
    config: Path, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config.read_text().replace("127.0.0.1:0", f"127.0.0.1:{taken_port}")
    config.write_text(text.replace("admin.sock", "none/admin.sock"))
    assert cli.main(["check-config", "--config", str(config)]) == 0
    capsys.readouterr()
    assert cli.main(["check-config", "--config", str(config), "--host"]) == 78
    assert capsys.readouterr().err.splitlines() == [
        f"api.listen: port {taken_port} on 127.0.0.1 is taken",
        f"node.admin_socket: {config.parent}/none is not a directory; make it, or name another "
        "path",
    ]


def test_serve_refuses_a_taken_port_before_it_loads_anything(config: Path, taken_port: int) -> None:
    config.write_text(config.read_text().replace("127.0.0.1:0", f"127.0.0.1:{taken_port}"))
    result = pdnode("serve", "--config", str(config))
    assert result.returncode == 78
    assert result.stderr == f"api.listen: port {taken_port} on 127.0.0.1 is taken\n"


def test_a_library_that_is_none_exits_with_71(config: Path) -> None:
    """In a process of its own: one libfabric per process, and this one may have it."""
    text = config.read_text().replace("colocated", "prefill")
    library = config.parent / "libfabric.so.1"
    library.write_text("no library")
    config.write_text(
        text + f'[fabric]\nport = 0\nlibrary = "{library}"\n[peer]\nlisten = "127.0.0.1:0"\n'
    )
    result = pdnode("check-config", "--config", str(config), "--host")
    assert result.returncode == 71
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"fabric.provider: library: cannot load {library}")
    assert pdnode("serve", "--config", str(config)).returncode == 71


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeviceMissing("no NIC"), Exit.DEVICE_MISSING),
        (EngineDied("worker died of signal 9"), Exit.INTERNAL),
        (RuntimeError("bug"), Exit.INTERNAL),
        (KeyboardInterrupt(), 130),
    ],
)
def test_failures_end_with_their_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_version", fail)
    assert cli.main(["version"]) == code


def test_only_host_problems_exit_with_71() -> None:
    missing = Problem("fabric.library", "not found", device=True)
    wrong = Problem("api.listen", "port 1 is taken")
    assert cli._exit_code([missing]) is Exit.DEVICE_MISSING
    assert cli._exit_code([missing, wrong]) is Exit.CONFIG


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pdnode"] == __version__
    assert found["protocol"] == {"min": 1, "max": 1}
    assert (found["libfabric"] is None) == (found["library"] is None)


def test_models_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = ["--cache-dir", str(tmp_path)]
    target = tmp_path / "models" / "smollm2-135m-instruct"
    assert cli.main(["model", "path", "smollm2", *cache]) == Exit.UNAVAILABLE
    assert capsys.readouterr() == (
        "",
        f"{target} is not there; run `pdnode model fetch smollm2`\n",
    )
    target.mkdir(parents=True)
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        (target / name).touch()
    assert cli.main(["model", "fetch", "smollm2", *cache]) == 0  # what is complete stays
    assert cli.main(["model", "list", "--json", *cache]) == 0
    path, listed = capsys.readouterr().out.splitlines()
    assert path == str(target)
    assert json.loads(listed) == [{"name": "smollm2", "path": str(target), "fetched": True}]


@pytest.mark.parametrize("args", [["version"], ["check-config", "--config", "CONFIG"]])
def test_light_commands_import_nothing_heavy(args: list[str], config: Path) -> None:
    args = [str(config) if arg == "CONFIG" else arg for arg in args]
    script = (
        "import sys\nfrom pdnode import cli\n"
        f"code = cli.main({args!r})\n"
        "heavy = {'torch', 'aiohttp', 'numpy', 'asyncio', 'pdnode.fabric._native'}\n"
        "print(code, sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.splitlines()[-1] == "0 []"
