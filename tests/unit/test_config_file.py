"""Files with one mistake each, as an operator makes them; and what a good file becomes."""

import dataclasses
import os
from pathlib import Path

import pytest

from pdnode.config import AUTO, DEMO_MODEL_DIR, NicConfig, PrefillConfig
from pdnode.configfile import key_lines, load, load_settings
from pdnode.errors import ConfigError, Problem
from pdnode.models.fetch import model_directory
from pdnode.types import Role

BAD = sorted((Path(__file__).parents[1] / "data" / "config").glob("*.toml"))
GOOD = """\
config_version = 1
[node]
role = "colocated"
[model]
path = "MODEL"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(b"0123456789abcdef\n")
    path.chmod(0o600)
    return path


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text.replace("MODEL", str(tmp_path / "tiny")))
    return path


def problems(path: Path) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return caught.value.problems


@pytest.mark.parametrize("bad", BAD, ids=lambda path: path.stem)
def test_each_mistake_is_named_once(bad: Path, tmp_path: Path, model: Path, token: Path) -> None:
    text = bad.read_text()
    expected = [
        line.removeprefix("# expect: ").split(": ", 1)
        for line in text.splitlines()
        if line.startswith("# expect: ")
    ]
    path = tmp_path / "config.toml"
    path.write_text(text.replace('"MODEL"', f'"{model}"').replace('"TOKEN"', f'"{token}"'))
    found = problems(path)
    left = list(found)
    for where, part in expected:
        match = [
            problem
            for problem in left
            if problem.where.rpartition(": ")[2] == where and part in problem.text
        ]
        assert match, f"{where}: {part} is not among {[str(p) for p in found]}"
        left.remove(match[0])
    assert left == []
    assert all(problem.where.startswith(str(path)) for problem in found)


def test_syntax_error_has_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "config_version = 1\n[node]\nrole = decode\n")
    (problem,) = problems(path)
    assert str(problem) == f"{path}:3: not TOML: Invalid value (column 8)"


def test_problems_carry_their_lines(tmp_path: Path, model: Path) -> None:
    text = GOOD + '[engine]\n  threads = "x"\n[[prefill]]\n[[prefill]]\naddress = 5\n'
    path = write(tmp_path, text)
    assert {problem.where for problem in problems(path)} == {
        f"{path}:7: engine.threads",
        f"{path}:8: prefill[0].address",  # not there: the line of its table
        f"{path}:10: prefill[1].address",
    }


def test_key_lines_reads_dotted_keys_and_arrays() -> None:
    text = "a.b = 1\n[x]\ny = 2 # z = 3\n[[ p . q ]]\nr = 1\n[[p.q]]\nr = 2\n"
    assert key_lines(text) == {
        "a.b": 1,
        "x": 2,
        "x.y": 3,
        "p.q[0]": 4,
        "p.q[0].r": 5,
        "p.q[1]": 6,
        "p.q[1].r": 7,
    }


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "not TOML"),
        (b"#" * (1 << 20) + b"\n", "larger than 1048576 bytes"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    (problem,) = problems(path)
    assert part in str(problem)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path / "none.toml")
    assert str(problem) == f"{tmp_path}/none.toml: cannot be read: No such file or directory"


def test_good_file(tmp_path: Path, model: Path) -> None:
    path = write(
        tmp_path,
        GOOD
        + '[kv]\npool_bytes = "64MiB"\n[api]\nlisten = "[::1]:9000"\n[engine]\nthreads = 3\n'
        + "[peer]\nlink_lost_s = 4\n",
    )
    config = load(path)
    assert config.node.role is Role.COLOCATED
    assert (config.model.path, config.model.name) == (model, "tiny")
    assert (config.api.host, config.api.port) == ("::1", 9000)
    assert (config.kv.pool_bytes, config.kv.page_tokens) == (64 << 20, AUTO)
    assert config.engine.threads == 3
    assert config.peer.link_lost_s == 4.0
    assert isinstance(config.peer.link_lost_s, float)
    assert config.fabric.nics == ()
    assert config.peer.token is None
    assert config.node.id


def test_nic_addresses_follow_from_each_other(tmp_path: Path, model: Path, token: Path) -> None:
    text = GOOD.replace("colocated", "prefill")
    text += f'[peer]\nlisten = "0.0.0.0:7700"\ntoken_credential = "{token}"\n'
    text += '[[fabric.nics]]\nname = "a"\naddress = "10.0.0.1"\n'
    text += '[[fabric.nics]]\nname = "b"\naddress = "10.0.0.2"\nlisten = "0.0.0.0"\n'
    text += '[[fabric.nics]]\nname = "c"\naddress = "10.0.0.3"\nadvertise = "192.0.2.3"\n'
    # A port on a wildcard address clashes with nothing of the same key.
    assert load(write(tmp_path, text)).fabric.nics == (
        NicConfig(name="a", address="10.0.0.1", listen="10.0.0.1", advertise="10.0.0.1"),
        NicConfig(name="b", address="10.0.0.2", listen="0.0.0.0", advertise="10.0.0.2"),
        NicConfig(name="c", address="10.0.0.3", listen="10.0.0.3", advertise="192.0.2.3"),
    )


def test_loopback_nodes_need_no_nic(tmp_path: Path, model: Path) -> None:
    text = GOOD.replace("colocated", "decode") + '[[prefill]]\naddress = "localhost:7700"\n'
    config = load(write(tmp_path, text))
    assert config.fabric.nics == (NicConfig("lo", "127.0.0.1", "", ""),)
    assert config.prefill == (PrefillConfig("localhost:7700", "localhost", 7700),)
    config = load(write(tmp_path, GOOD.replace("colocated", "prefill")))
    assert config.fabric.nics == (NicConfig("lo", "127.0.0.1", "127.0.0.1", "127.0.0.1"),)


def test_demo_model_is_looked_for_in_the_cache(tmp_path: Path) -> None:
    text = GOOD.replace("MODEL", "smollm2").replace("[model]", f'cache_dir = "{tmp_path}"\n[model]')
    (problem,) = problems(write(tmp_path, text))
    assert "run `pdnode model fetch smollm2`" in problem.text
    made = tmp_path / DEMO_MODEL_DIR
    assert made == model_directory(tmp_path)
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    config = load(write(tmp_path, text))
    assert (config.model.path, config.model.name) == (made, "smollm2-135m-instruct")


def test_test_provider_only_where_the_caller_allows_it(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, GOOD + '[fabric]\nprovider = "tcp-rdm"\n')
    assert load(path, allow_test_provider=True).fabric.provider == "tcp-rdm"


def test_effective_settings_and_their_origin(tmp_path: Path, model: Path, token: Path) -> None:
    text = GOOD.replace("colocated", "prefill") + f'[peer]\ntoken_credential = "{token}"\n'
    loaded = load_settings(write(tmp_path, text), overrides={"node.log_format": "json"})
    rows = {setting.where: (setting.value, setting.origin) for setting in loaded.settings}
    assert rows["node.log_format"] == ('"json"', "flag")
    assert rows["node.role"] == ('"prefill"', "file")
    assert rows["engine.chunk_tokens"] == ("512", "default")
    assert rows["model.name"] == ('"tiny"', "default")
    assert rows["fabric.nics[0].advertise"] == ('"127.0.0.1"', "default")
    assert rows["peer.token_credential"] == (f'"{token}"', "file")
    assert loaded.config.node.log_format == "json"
    assert loaded.config.peer.token == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(loaded)


def test_records_are_frozen(tmp_path: Path, model: Path) -> None:
    config = load(write(tmp_path, GOOD))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.node.id = "other"  # type: ignore[misc]


class TestSecrets:
    def load(self, tmp_path: Path, credential: str) -> bytes | None:
        text = GOOD + f'[peer]\ntoken_credential = "{credential}"\n'
        return load(write(tmp_path, text)).peer.token

    def problem(self, tmp_path: Path, credential: str) -> str:
        with pytest.raises(ConfigError) as caught:
            self.load(tmp_path, credential)
        (problem,) = caught.value.problems
        return problem.text

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
    def test_wider_mode_is_refused(
        self, tmp_path: Path, model: Path, token: Path, mode: int
    ) -> None:
        token.chmod(mode)
        expected = f"{token} has mode {mode:04o}; only 0600 or less is taken"
        assert self.problem(tmp_path, str(token)) == expected
        token.chmod(0o400)
        assert self.load(tmp_path, str(token)) == b"0123456789abcdef"

    def test_name_is_looked_up_in_the_credentials_directory(
        self, tmp_path: Path, model: Path, token: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
        assert "$CREDENTIALS_DIRECTORY, which is not set" in self.problem(tmp_path, "token")
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
        token.chmod(0o440)  # systemd's own mode
        assert self.load(tmp_path, "token") == b"0123456789abcdef"
        assert self.problem(tmp_path, "../token") == "expected a plain name or an absolute path"

    @pytest.mark.parametrize(("size", "counted"), [(15, 15), (0, 0), (4097, 4097), (9000, 4097)])
    def test_size_is_bounded(
        self, tmp_path: Path, model: Path, token: Path, size: int, counted: int
    ) -> None:
        token.write_bytes(b"x" * size)
        assert f"of {counted} bytes; 16..4096 are taken" in self.problem(tmp_path, str(token))

    def test_a_pipe_does_not_hang(self, tmp_path: Path, model: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe, 0o600)
        assert self.problem(tmp_path, str(pipe)) == f"{pipe} is not a regular file"
