"""The unit files: systemd understands them, the sandbox is tight, the instance unit is its twin."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.units import UNITS

PROGRAMS = ("/usr/bin/pdnode", "/usr/bin/nvidia-modprobe")
INSTANCE = {
    "/etc/pdnode/config.toml": "/etc/pdnode/%i.toml",
    "/run/pdnode/admin.sock": "/run/pdnode/%i/admin.sock",
    "RuntimeDirectory=pdnode": "RuntimeDirectory=pdnode/%i",
    "StateDirectory=pdnode": "StateDirectory=pdnode/%i",
    "WorkingDirectory=/var/lib/pdnode": "WorkingDirectory=/var/lib/pdnode/%i",
    "serving node": "serving node %i",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units, with programs that this machine has in the place of those that it lacks."""
    folder = tmp_path_factory.mktemp("units")
    for unit in UNITS.glob("*.service"):
        text = unit.read_text()
        for program in PROGRAMS:
            text = text.replace(program, "/bin/true")
        (folder / unit.name).write_text(text)
    shutil.copytree(UNITS / "pdnode.service.d", folder / "pdnode.service.d")
    return folder


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", ["pdnode.service", "pdnode@one.service", "pdnode-devices.service"])
def test_verify_says_nothing(installed: Path, name: str) -> None:
    done = analyze("verify", "--man=no", str(installed / name))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["pdnode.service", "pdnode@.service"])
def test_the_sandbox_is_tight(installed: Path, name: str) -> None:
    """An exposure of 2.5 of 10 at most; the units without their sandbox are above 9."""
    done = analyze("security", "--offline=true", "--threshold=25", str(installed / name))
    assert done.returncode == 0, done.stdout[-400:]
    bare = installed / f"bare-{name}"
    text = (installed / name).read_text()
    head, _, rest = text.partition("# Devices.")
    bare.write_text(head + "\n[Install]" + rest.partition("[Install]")[2])
    assert analyze("security", "--offline=true", "--threshold=90", str(bare)).returncode != 0


def directives(name: str) -> list[str]:
    lines = (UNITS / name).read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_the_instance_unit_differs_only_where_it_must() -> None:
    expected = []
    for line in directives("pdnode.service"):
        for here, there in INSTANCE.items():
            if here in line and not line.startswith(("RuntimeDirectoryMode", "StateDirectoryMode")):
                line = line.replace(here, there)
        expected.append(line)
    assert directives("pdnode@.service") == expected


def made_by(tool: str, *arguments: str, root: Path) -> str:
    """What `tool` leaves in a root directory of its own that knows root and, in part, pdnode."""
    (root / "etc").mkdir(parents=True)
    more = "" if tool == "systemd-sysusers" else "pdnode:x:990:990::/:/bin/sh\n"
    (root / "etc/passwd").write_text(f"root:x:0:0::/:/bin/sh\n{more}")
    (root / "etc/group").write_text("root:x:0:\n" + ("pdnode:x:990:\n" if more else ""))
    done = subprocess.run(
        [tool, f"--root={root}", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return (root / "etc/passwd").read_text()


def test_sysusers_makes_the_user(tmp_path: Path) -> None:
    passwd = made_by("systemd-sysusers", str(UNITS / "pdnode.sysusers"), root=tmp_path / "root")
    [line] = [line for line in passwd.splitlines() if line.startswith("pdnode:")]
    assert "/var/lib/pdnode" in line


def test_tmpfiles_makes_the_directories(tmp_path: Path) -> None:
    root = tmp_path / "root"
    made_by("systemd-tmpfiles", "--create", str(UNITS / "pdnode.tmpfiles"), root=root)
    modes = {
        name: oct((root / name).stat().st_mode & 0o777)
        for name in ("etc/pdnode", "etc/pdnode/credentials", "var/lib/pdnode", "var/cache/pdnode")
    }
    assert list(modes.values()) == ["0o750", "0o700", "0o750", "0o750"], modes
