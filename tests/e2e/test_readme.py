"""The README's first two nodes, line by line as they stand, where its ports are free."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import needs_namespaces
from tests.support.model import smollm2_dir

pytestmark = [
    pytest.mark.timeout(240),
    needs_namespaces,
    pytest.mark.skipif(
        not all(map(shutil.which, ("unshare", "curl"))), reason="needs unshare and curl"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
CACHE = "/var/cache/pdnode"
BEFORE = f"""
set -eu
ip link set lo up
mount -t tmpfs none /run
mount -t tmpfs none /var/cache
mkdir {CACHE}
mount --bind "$CACHE" {CACHE}
"""
READY = "timeout 120 sh -c 'until curl -fsS http://127.0.0.1:8000/readyz; do sleep 0.2; done'"


def commands() -> str:
    """The block, with the daemons in the background and a wait before the first question."""
    section = (ROOT / "README.md").read_text().partition("## The first two nodes")[2]
    block = section.partition("```sh\n")[2].partition("```")[0]
    block, daemons = re.subn(r"^(pdnode serve --config \S+).*$", r"\1 &", block, flags=re.M)
    assert daemons == 2
    assert block.count("\ncurl ") == 1
    return block.replace("\ncurl ", f"\n{READY}\ncurl ")


def test_the_first_two_nodes_of_the_readme(tmp_path: Path) -> None:
    model = smollm2_dir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (tmp_path / "log").open("wb") as log:
        shell = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
             "sh", "-c", BEFORE + commands()],
            cwd=ROOT, env=os.environ | {"PATH": path, "CACHE": str(model.parent.parent)},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            code = shell.wait(200)
        finally:
            shell.send_signal(signal.SIGKILL)
            shell.wait()
    said = (tmp_path / "log").read_text()
    assert code == 0, said
    assert "Paris" in said
    assert "decode-1" in said.partition("Paris")[2], "no picture of the node after the answer"
