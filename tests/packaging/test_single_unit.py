"""The single file as the program of the unit, in its sandbox, under a systemd of its own."""

import shlex
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode.localnodes import free_ports
from tests.support.own_systemd import WAIT_S, OwnSystemd, own_systemd, why_not
from tests.support.tiny_model import write_tiny_llama
from tests.support.units import guide

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

UNIT = "pdnode.service"
LOG = "/run/pdnode.log"
CONFIG = """config_version = 1
[node]
role = "colocated"
[model]
path = "/var/lib/pdnode/model"
[engine]
threads = 1
[kv]
pool_bytes = "64MiB"
[api]
listen = "127.0.0.1:{port}"
"""


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[OwnSystemd]:
    drop_in = tmp_path / "units" / f"{UNIT}.d"
    drop_in.mkdir(parents=True)
    lines = ["[Service]", f"StandardOutput=append:{LOG}", f"StandardError=append:{LOG}"]
    (drop_in / "test.conf").write_text("\n".join(lines) + "\n")
    with own_systemd(tmp_path) as found:
        yield found
        sys.stdout.write(found.run("tail", "-n", "60", LOG).stdout)  # shown if the test failed


def test_the_unit_unpacks_into_its_cache_and_serves(
    root: Path, systemd: OwnSystemd, tmp_path: Path
) -> None:
    *steps, start = guide()
    for step in steps:
        systemd.do("sh", "-ec", f"cd {shlex.quote(str(root))}; {step}")
    systemd.do("install", "-m", "755", str(root / "dist" / "pdnode"), "/usr/bin/pdnode")
    systemd.do("cp", "-r", str(write_tiny_llama(tmp_path / "model")), "/var/lib/pdnode/model")
    systemd.do("chown", "-R", "pdnode:pdnode", "/var/lib/pdnode/model")
    [port] = free_ports(1)
    systemd.write("/etc/pdnode/config.toml", CONFIG.format(port=port))

    systemd.do("sh", "-ec", start)
    assert systemd.show(UNIT, "ActiveState") == "active"
    assert systemd.show(UNIT, "StatusText").startswith("serving as colocated")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=WAIT_S) as answer:
        assert answer.status == 200
    said = systemd.do("sh", "-c", "stat -c '%U %a' /var/cache/pdnode/program-*[0-9a-f]")
    assert said == "pdnode 700\n"
    daemon = systemd.show(UNIT, "MainPID")
    program = systemd.do("readlink", f"/proc/{daemon}/exe").strip()
    assert program.startswith("/var/cache/pdnode/program-")
    systemd.do("systemctl", "reload", UNIT)

    systemd.do("systemctl", "stop", UNIT)
    assert systemd.show(UNIT, "Result") == "success"
    assert systemd.show(UNIT, "ExecMainStatus") == "0"
