"""`pdnode status` and friends where no node is needed: text, exit codes, hostile names, silence."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode import cli
from pdnode.adminclient import AdminClient, TooSlow, status_lines
from pdnode.errors import Exit
from pdnode.obs.snapshot import Model, Node, Peer, Queue, Snapshot, Transfer, Warning


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Path]:
    """A socket that takes connections and never answers."""
    path = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(4)
        yield path


def test_status_lines() -> None:
    snapshot = Snapshot(
        protocol=1,
        time_s=0.0,
        node=Node(
            id="dc", boot="0123456789", role="decode", state="loading", version="1.2",
            uptime_s=61.4, detail="weights 40%",
        ),
        model=Model(name="m"),
        ready=False,
        queues=(
            Queue(name="waiting", now=2, peak=3, limit=256),
            Queue(name="kv-drain", now=0, peak=0),
        ),
        transfers=(
            Transfer(
                request_id="r-1", peer="pf", state="wire", tokens=99, pages=7, age_s=0.25,
                pages_done=3.5,
            ),
        ),
        peers=(Peer(name="p\x1b[31m", role="", state="lost", last_error="no\nway"),),
        warnings=(Warning(code="W202", severity="warning", text="p: lost", since_s=1.0),),
    )  # fmt: skip
    assert status_lines(snapshot) == [
        "dc  decode  loading (weights 40%), not ready, up 61 s",
        "model m  pdnode 1.2  boot 01234567",
        "queue waiting: 2 now, 3 at most, limit 256",
        "queue kv-drain: 0 now, 0 at most, no limit of its own",
        "transfer r-1 with pf: wire, 7 pages, 3.5 there, 0.2 s",
        "peer p?[31m: unknown role, lost, no?way",
        "warning W202: p: lost",
    ]


@pytest.mark.parametrize("command", ["status", "drain", "undrain", "reload"])
def test_nobody_there_is_69(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.sock"
    assert cli.main([command, "--socket", str(path)]) == Exit.UNAVAILABLE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"no daemon answers on {path}: No such file or directory\n"


def test_a_daemon_that_hangs_is_not_waited_for(silent: Path) -> None:
    with pytest.raises(TooSlow, match=r"no answer on .* within 0.05 s"):
        AdminClient(silent, timeout_s=0.05).snapshot()


@pytest.mark.parametrize(
    "arguments", [["cancel"], ["drain", "--timeout-s", "-1"], ["drain", "--timeout-s", "nan"]]
)
def test_wrong_usage_is_64(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == Exit.USAGE
