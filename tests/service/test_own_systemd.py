"""The unit started for real, by a systemd of its own: sandbox, start, reload, deaths, stop."""

import json
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode.localnodes import free_ports
from tests.support.own_systemd import WAIT_S, OwnSystemd, own_systemd, why_not
from tests.support.units import UNITS, guide

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

UNIT = "pdnode.service"
LOG = "/run/pdnode.log"
CONFIG = "/etc/pdnode/config.toml"
HOMES = ("/home", "/root", "/run/user")
USED = (Path(sys.executable).resolve(), Path(sys.prefix), UNITS)
"""What the unit needs of this machine; an installed one lies in better places."""


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[OwnSystemd]:
    """It finds the shipped units where the guide installs them."""
    drop_in = tmp_path / "units" / f"{UNIT}.d"
    drop_in.mkdir(parents=True)
    lines = ["[Service]", f"StandardOutput=append:{LOG}", f"StandardError=append:{LOG}",
             "WatchdogSec=4", "RestartSec=0.1"]  # fmt: skip
    if any(path.is_relative_to(home) for home in HOMES for path in USED):
        lines.append("ProtectHome=no")
    if any(path.is_relative_to("/tmp") for path in USED):
        lines.append("PrivateTmp=no")
    (drop_in / "test.conf").write_text("\n".join(lines) + "\n")
    with own_systemd(tmp_path) as found:
        yield found
        sys.stdout.write(found.run("tail", "-n", "60", LOG).stdout)  # shown if the test failed


def install(systemd: OwnSystemd, model: Path, port: int, other_port: int) -> str:
    """What the guide says, and everything that the unit expects; the configuration."""
    *steps, _ = guide()
    for step in steps:
        systemd.do("sh", "-ec", f"cd {shlex.quote(str(UNITS.parent))}; {step}")
    above = {str(folder) for path in USED for folder in path.parents}
    systemd.do("chmod", "o+x", *sorted(above))  # a home may be closed to others; in the overlay
    python = shlex.quote(sys.executable)
    systemd.write("/usr/bin/pdnode", f'#!/bin/sh\nexec {python} -m pdnode "$@"\n', mode="755")
    systemd.do("cp", "-r", str(model), "/var/lib/pdnode/model")
    systemd.do("chown", "-R", "pdnode:pdnode", "/var/lib/pdnode/model")
    config = f"""config_version = 1
[node]
id = "unit"
role = "decode"
log_level = "info"
[model]
path = "/var/lib/pdnode/model"
name = "test-model"
[engine]
threads = 1
[kv]
pool_bytes = "64MiB"
page_tokens = 16
[api]
listen = "127.0.0.1:{port}"
[[prefill]]
address = "127.0.0.1:{other_port}"
"""
    systemd.write(CONFIG, config)
    return config


def ask(port: int, max_tokens: int = 3) -> int:
    """Tokens of an answer, once the node is ready."""
    body = {"model": "test-model", "prompt": [1, 2, 3], "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return json.load(answer)["usage"]["completion_tokens"]
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def worker_of(systemd: OwnSystemd, daemon: str) -> str:
    [worker] = systemd.do("cat", f"/proc/{daemon}/task/{daemon}/children").split()
    return worker


def test_start_reload_deaths_and_stop(systemd: OwnSystemd, tiny_model: Path) -> None:
    port, other_port = free_ports(2)
    config = install(systemd, tiny_model, port, other_port)

    systemd.do("sh", "-ec", guide()[-1])
    assert systemd.show(UNIT, "ActiveState") == "active"
    assert systemd.show(UNIT, "StatusText").startswith("serving as decode")
    assert "serving as decode" in systemd.do("systemctl", "status", "pdnode")
    assert ask(port) == 3
    daemon = systemd.show(UNIT, "MainPID")
    assert systemd.do("stat", "-c", "%U %a", "/run/pdnode/admin.sock").split() == ["pdnode", "660"]
    assert systemd.do("ps", "-o", "user=", "-p", daemon).strip() == "pdnode"

    reload(systemd, config)
    assert systemd.show(UNIT, "MainPID") == daemon

    worker = worker_of(systemd, daemon)  # kill -9 of a worker: the unit hears nothing of it
    systemd.do("kill", "-9", worker)
    assert ask(port) == 3
    assert worker_of(systemd, daemon) != worker
    assert systemd.show(UNIT, "MainPID") == daemon
    assert systemd.show(UNIT, "NRestarts") == "0"

    systemd.do("kill", "-9", daemon)  # of the daemon: the unit starts it again
    systemd.until(UNIT, "NRestarts", "1")
    systemd.until(UNIT, "ActiveState", "active")
    assert ask(port) == 3

    starve(systemd, port)
    systemd.until(UNIT, "NRestarts", "2")
    systemd.until(UNIT, "ActiveState", "active")
    assert ask(port) == 3
    assert "Fatal Python error: Aborted" in systemd.do("cat", LOG)

    systemd.do("systemctl", "restart", UNIT)
    assert ask(port) == 3
    systemd.do("systemctl", "stop", UNIT)
    assert systemd.show(UNIT, "ActiveState") == "inactive"
    assert systemd.show(UNIT, "Result") == "success"
    assert systemd.show(UNIT, "ExecMainStatus") == "0"
    assert systemd.run("ls", "/run/pdnode").returncode != 0


def reload(systemd: OwnSystemd, config: str) -> None:
    """What may change changes; the rest is refused, and the node goes on."""
    level = (
        "curl",
        "-fsS",
        "--unix-socket",
        "/run/pdnode/admin.sock",
        "http://n/admin/v1/log-level",
    )
    systemd.write(CONFIG, config.replace('"info"', '"debug"'))
    systemd.do("systemctl", "reload", UNIT)
    assert json.loads(systemd.do(*level)) == {"level": "debug"}
    systemd.write(CONFIG, config.replace("64MiB", "32MiB"))
    assert systemd.run("systemctl", "reload", UNIT).returncode != 0
    assert systemd.show(UNIT, "ActiveState") == "active"
    assert "W110" in systemd.show(UNIT, "StatusText")
    systemd.write(CONFIG, config)
    systemd.do("systemctl", "reload", UNIT)


def starve(systemd: OwnSystemd, port: int) -> None:
    """A request runs and its worker stands still: the watchdog ends the daemon."""
    daemon = systemd.show(UNIT, "MainPID")
    worker = worker_of(systemd, daemon)
    systemd.do("kill", "-STOP", worker)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(
            urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps({"model": "test-model", "prompt": [1, 2], "max_tokens": 2}).encode(),
                {"Content-Type": "application/json"},
            ),
            timeout=WAIT_S,
        )
