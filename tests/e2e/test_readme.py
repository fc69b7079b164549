"""The README's first two nodes, line by line as they stand, where its ports are free; and what it
measures with, on other ports and for a shorter time."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import needs_namespaces
from tests.support.model import smollm2_dir
from tests.support.nodes import NodeSpec, clients, nodes
from tests.support.tiny_model import write_tiny_llama

pytestmark = pytest.mark.timeout(400)

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


def section(title: str) -> str:
    """Its first block of commands."""
    text = (ROOT / "README.md").read_text().partition(f"## {title}\n")[2]
    return text.partition("```sh\n")[2].partition("```")[0]


def commands() -> str:
    """The block, with the daemons in the background and a wait before the first question."""
    block = section("The first two nodes")
    block, daemons = re.subn(r"^(pdnode serve --config \S+).*$", r"\1 &", block, flags=re.M)
    assert daemons == 2
    assert block.count("\ncurl ") == 1
    return block.replace("\ncurl ", f"\n{READY}\ncurl ")


@needs_namespaces
@pytest.mark.skipif(
    not all(map(shutil.which, ("unshare", "curl"))), reason="needs unshare and curl"
)
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


async def test_what_the_readme_measures_with(tmp_path: Path) -> None:
    """Its last line starts nodes of its own and takes minutes: tests/e2e/test_bench_serve.py."""
    model = write_tiny_llama(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    prefill = NodeSpec("pf", "prefill", model, tmp_path)
    decode = NodeSpec("dc", "decode", model, tmp_path, (prefill,))
    other = NodeSpec("co", "colocated", model, tmp_path)
    *lines, last = section("Measure").splitlines()
    assert shlex.split(last, comments=True) == ["pdnode", "bench", "serve", "--compare"]
    assert len(lines) == 4
    with nodes(prefill, decode, other) as running:
        async with clients(prefill, decode, other) as found:
            for client, node in zip(found, running, strict=True):
                await client.wait_ready(node)
        for line in lines:
            words = shlex.split(line, comments=True)
            words = [word.replace(":8000", f":{decode.ports[0]}") for word in words]
            words = [word.replace(":8001", f":{other.ports[0]}") for word in words]
            words += ["--requests", "4", "--idle", "1"]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *words,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, err = await asyncio.wait_for(process.communicate(), 200)
            assert process.returncode == 0, (line, err.decode())
            if "--json" in words:
                counts = [one["completed"] for one in json.loads(out)["targets"]]
            else:
                counts = [int(one) for one in re.findall(rb"completed (\d+)", out)]
            assert counts == [4] * (2 if "--compare" in words else 1), (line, out)
