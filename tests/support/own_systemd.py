"""A systemd of one's own: PID 1 of new namespaces, over an overlay of this machine's files.

Nothing of it reaches the machine but its network: files change in the overlay, which lies in
memory, and the processes end with the test.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WAIT_S = 90.0
_UNITS = "/etc/systemd/system:/run/units"
_EMPTY = ("sysinit", "basic", "shutdown", "multi-user", "umount", "final")

# In the new namespaces. $1: an empty directory, $2: the unit files.
_BOOT = f"""
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay overlay -o lowerdir=/,upperdir="$1/up",workdir="$1/work" "$1/root"
units=$2
cd "$1/root"
mount -t proc proc proc
mount --rbind /dev dev
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mkdir run/units
cp -r "$units/." run/units
mkdir -p old
pivot_root . old
umount -l /old
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=pdnode-test SYSTEMD_UNIT_PATH={_UNITS} \
    SYSTEMD_LOG_TARGET=console /lib/systemd/systemd --system --unit=test.target --show-status=no
"""


def why_not() -> str:
    """What this machine lacks for it; nothing if it can be tried."""
    if os.geteuid() != 0:
        return "a systemd of one's own needs root"
    lacking = [name for name in ("unshare", "nsenter", "pivot_root") if shutil.which(name) is None]
    if not Path("/lib/systemd/systemd").exists():
        lacking.append("/lib/systemd/systemd")
    if lacking:
        return f"not on this machine: {', '.join(lacking)}"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system"
    return "" if _cgroup2() is not None else "no cgroup2 is mounted"


def _cgroup2() -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2" and "rw" in options.split(","):
            return Path(where)
    return None


@dataclass(frozen=True, slots=True)
class OwnSystemd:
    pid: int  # of its systemd, on this machine

    def run(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """A command in its namespaces, to its end."""
        return subprocess.run(
            ["nsenter", "-t", str(self.pid), "-a", *command],
            input=text, capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip

    def do(self, *command: str, text: str = "") -> str:
        """A command that must succeed; its output."""
        done = self.run(*command, text=text)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def write(self, path: str, text: str, *, mode: str = "644") -> None:
        self.do("install", "-D", "-m", mode, "/dev/stdin", path, text=text)

    def show(self, unit: str, name: str) -> str:
        return self.do("systemctl", "show", "--value", "-p", name, unit).strip()

    def until(self, unit: str, name: str, wanted: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while (seen := self.show(unit, name)) != wanted:
            assert time.monotonic() < deadline, f"{unit} {name} is {seen}, not {wanted}"
            time.sleep(0.1)


@contextlib.contextmanager
def own_systemd(folder: Path) -> Iterator[OwnSystemd]:
    """It knows the units of /etc/systemd/system, those in `folder`/units, and the few targets that
    it needs; it starts none by itself.
    """
    known = folder / "units"
    for name in _EMPTY:
        (known / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    (known / "test.target").write_text("[Unit]\nAllowIsolate=yes\n")
    root = folder / "root"
    root.mkdir()
    mount = _cgroup2()
    assert mount is not None
    group = mount / f"pdnode-test-{os.getpid()}"
    group.mkdir()
    log = folder / "systemd.log"
    script = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [
                "sh", "-c", script, str(group),
                "unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "--cgroup",
                "--kill-child", "sh", "-c", _BOOT, "sh", str(root), str(known),
            ],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
        )  # fmt: skip
    try:
        yield _booted(process, log)
    finally:
        process.kill()
        process.wait(WAIT_S)
        _remove(group)


def _booted(process: subprocess.Popen[bytes], log: Path) -> OwnSystemd:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        for child in children.read_text().split():
            found = OwnSystemd(int(child))
            name = Path(f"/proc/{child}/comm").read_text().strip()
            if name == "systemd" and found.run("systemctl", "is-system-running").returncode == 0:
                return found
        time.sleep(0.1)
    raise AssertionError(f"systemd is not up:\n{log.read_text()}")


def _remove(group: Path) -> None:
    """The cgroup, once the kernel has let go of what ran in it."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for inner in sorted(group.rglob("*/"), reverse=True):
            with contextlib.suppress(OSError):
                inner.rmdir()
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
    raise AssertionError(f"{group} is still in use")
