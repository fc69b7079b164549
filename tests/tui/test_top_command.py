"""`pdnode top` as a process: one picture, JSON, no terminal, poor terminals, wrong options."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import msgspec
import pytest
from pdnode_tui import mock
from pdnode_tui.source import Recorder

from pdnode.obs.snapshot import encode
from tests.support.console import hostile

TOP = [sys.executable, "-m", "pdnode", "top"]
TIMEOUT_S = 60.0


def top(*options: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    base = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    base |= {"TERM": "xterm-256color", "PYTHONUTF8": "1"}
    return subprocess.run(
        [*TOP, *options], stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S,
        env=base | dict(env or {}), check=False,
    )  # fmt: skip


def test_one_picture_has_no_keys_and_no_escapes() -> None:
    done = top("--mock", "degraded", "--once")
    lines = done.stdout.decode().splitlines()
    assert (done.returncode, done.stderr, len(lines)) == (0, b"", 29)
    assert "node-a17  DECODE" in lines[0]
    assert "KV IN FLIGHT" in lines[3]
    assert "\x1b" not in done.stdout.decode()
    assert "q quit" not in done.stdout.decode()


@pytest.mark.parametrize("term", ["dumb", "", "xterm-256color"])
def test_without_a_terminal_it_is_one_picture(term: str, tmp_path: Path) -> None:
    """Output to a pipe and to a file, whatever TERM says."""
    done = top("--mock", "healthy", env={"TERM": term})
    assert (done.returncode, done.stderr) == (0, b"")
    file = tmp_path / "out.txt"
    with file.open("wb") as sink:
        code = subprocess.run(
            [*TOP, "--mock", "healthy"], stdin=subprocess.DEVNULL, stdout=sink, check=False,
            timeout=TIMEOUT_S, env={**os.environ, "TERM": term, "PYTHONUTF8": "1"},
        ).returncode  # fmt: skip
    assert code == 0
    assert "KV IN FLIGHT" in file.read_text()


@pytest.mark.parametrize("env", [{"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
                                 {"PYTHONIOENCODING": "latin-1"}])  # fmt: skip
def test_no_utf8_means_ascii(env: dict[str, str]) -> None:
    done = top("--mock", "degraded", env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"+- KV IN FLIGHT" in done.stdout


def test_json_is_the_document() -> None:
    done = top("--mock", "degraded", "--json")
    assert done.stdout == encode(mock.snapshot("degraded")) + b"\n"


def test_hostile_names_are_printed_as_text(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.jsonl", 0.0)
    recorder.write(encode(hostile()), 0.0)
    recorder.close()
    done = top("--replay", str(tmp_path / "r.jsonl"))
    assert (done.returncode, done.stderr) == (0, b"")
    assert not set(done.stdout.decode()) & {"\x1b", "\r", "\t", "\x00", "\x9b", "\u202e"}
    assert len(done.stdout.decode().splitlines()) == 29


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--interval", "99"), 64, "--interval: 99: 0.2 to 10 seconds"),
        (("--interval", "nan"), 64, "--interval: nan: 0.2 to 10 seconds"),
        (("--mock", "sick"), 64, "choose from"),
        (("--mock", "empty", "--replay", "x"), 64, "--mock, --replay: only one of them"),
        (("--replay", "missing.jsonl"), 64, "--replay: missing.jsonl: No such file"),
        (("--socket", "missing.sock"), 69, "unix:missing.sock: No such file or directory"),
        (("--socket", "missing.sock", "--json"), 69, "No such file or directory"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(options: tuple[str, ...], code: int, text: str) -> None:
    done = top(*options)
    assert (done.returncode, done.stdout) == (code, b"")
    assert text in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_a_reader_that_leaves_is_no_error() -> None:
    script = f"{' '.join(TOP)} --mock healthy --json | true"
    done = subprocess.run(["sh", "-c", f"{script}; exit 0"], stdin=subprocess.DEVNULL,
                          capture_output=True, timeout=TIMEOUT_S, check=False)  # fmt: skip
    assert done.stderr == b""


class Terminal:
    """The command in a pseudo-terminal of 100 x 30."""

    def __init__(self, *options: str, env: Mapping[str, str]) -> None:
        self.text = ""
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self._process = subprocess.Popen(
            [*TOP, *options], stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**os.environ, "PYTHONUTF8": "1", **env},
        )  # fmt: skip
        os.close(inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def until(self, condition: Callable[[], object]) -> None:
        """Read what is drawn until `condition` holds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, self.text[-2000:]
            if select.select([self._fd], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # EIO: the other side is closed
                    self.text += os.read(self._fd, 1 << 16).decode(errors="replace")

    def end(self) -> int:
        """Read all until it has ended; the exit code."""
        self.until(lambda: self._process.poll() is not None)
        while select.select([self._fd], [], [], 0)[0]:
            try:
                self.text += os.read(self._fd, 1 << 16).decode(errors="replace")
            except OSError:
                break
        return int(self._process.returncode)


@pytest.mark.parametrize("env", [{"TERM": "xterm-256color"}, {"TERM": "vt100", "NO_COLOR": "1"},
                                 {"TERM": "no-such-terminal"}])  # fmt: skip
def test_in_a_terminal_it_draws_and_q_ends_it(env: dict[str, str]) -> None:
    with Terminal("--mock", "degraded", env=env) as terminal:
        terminal.until(lambda: "node-a17" in terminal.text)
        terminal.press("2")
        terminal.until(lambda: "line rate" in terminal.text)
        terminal.press("q")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.text


def test_a_dumb_terminal_gets_one_picture() -> None:
    with Terminal("--mock", "degraded", env={"TERM": "dumb"}) as terminal:
        assert terminal.end() == 0
        assert "KV IN FLIGHT" in terminal.text
        assert "\x1b" not in terminal.text


def test_the_help_names_every_option() -> None:
    text = top("--help").stdout.decode()
    for option in ("--socket", "--interval", "--readonly", "--once", "--json", "--ascii",
                   "--mock", "--replay"):  # fmt: skip
        assert option in text
    assert msgspec.json.decode(top("--mock", "empty", "--json").stdout)["node"]["id"] == "node-new"
