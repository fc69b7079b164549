"""The single file, on a host that has nothing but glibc and zlib; and the folder form.

The host is a root directory of its own, without a shell, without Python, with no network but
loopback, and the environment is empty.
"""

import json
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdnode import __version__
from tests.support.hosts import needs_namespaces
from tests.support.model import smollm2_dir

pytestmark = [
    pytest.mark.timeout(600),
    needs_namespaces,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="knows glibc's files of x86_64 only"),
]

GLIBC = ("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1")
ZLIB = "libz.so.1"
MOUNTS = """
set -eu
cd "$1"; shift
mount -t proc none proc
mount --rbind /sys sys
mount --rbind /dev dev
mount --bind "$1" model; shift
ip link set lo up
exec env -i "$(command -v chroot)" . "$@"
"""


class Bare:
    """A host with these libraries, the file in /here, a model in /model and a configuration."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        for name in ("proc", "sys", "dev", "tmp", "model", "here", "var/cache", "run/pdnode"):
            (folder / name).mkdir(parents=True)
        loader = Path("/lib64/ld-linux-x86-64.so.2")
        copy_to(folder / "lib64", loader)
        for name in (*GLIBC, ZLIB):
            copy_to(folder / "lib" / "x86_64-linux-gnu", loader.resolve().with_name(name))
        text = (root / "examples" / "decode.toml").read_text()
        (folder / "decode.toml").write_text(text.replace('"smollm2"', '"/model"'))
        copy_to(folder / "here", root / "dist" / "pdnode")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child",
             "sh", "-c", MOUNTS, "sh", self.folder, smollm2_dir(), *command],
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip

    def pdnode(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("/here/pdnode", *arguments)

    def says(self, *arguments: str) -> str:
        done = self.pdnode(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


def copy_to(folder: Path, file: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(file.resolve(), folder / file.name)


@pytest.fixture(scope="module")
def host(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    """Its /var/cache/pdnode keeps the copy over the tests of this module."""
    folder = tmp_path_factory.mktemp("host")
    yield Bare(folder, root)
    shutil.rmtree(folder)  # with its copy, some hundred MB


def test_versions(host: Bare) -> None:
    first = host.pdnode("version", "--json")
    assert first.returncode == 0, first.stderr
    version = json.loads(first.stdout)
    assert version["pdnode"] == __version__
    assert version["library"].startswith("/var/cache/pdnode/program-"), "not its own libfabric"
    assert "unpacking into /var/cache/pdnode/program-" in first.stderr
    assert host.pdnode("version").stderr == ""


def test_the_demo_answers_offline(host: Bare) -> None:
    report = json.loads(host.says("demo", "--model", "/model", "--json"))
    assert "Paris" in report["answer"]
    assert report["prefill"] == "demo-prefill"
    assert report["writes"] > 0


def test_reading_commands(host: Bare) -> None:
    effective = host.says("check-config", "--config", "/decode.toml", "--print-effective")
    assert 'node.role = "decode"  # file' in effective
    assert "gpus" in json.loads(host.says("topology", "--json"))
    assert "peers 5/6" in host.says("top", "--mock", "degraded", "--once")


def test_a_wrong_configuration_exits_as_ever(host: Bare) -> None:
    (host.folder / "wrong.toml").write_text("config_version = 1\nnonsense = 1\n")
    done = host.pdnode("check-config", "--config", "/wrong.toml")
    assert done.returncode == 78
    assert "nonsense" in done.stderr


def test_the_benchmarks_start_their_other_ends(host: Bare) -> None:
    said = host.says(
        "bench", "transfer", "--provider", "tcp", "--page-bytes", "65536", "--pattern",
        "scattered", "--mib", "4", "--raises", "5", "--json",
    )  # fmt: skip
    assert "65536" in said


def test_a_model_is_not_fetched_without_python(host: Bare) -> None:
    done = host.pdnode("model", "fetch", "smollm2")
    assert done.returncode == 70
    assert "needs python3 with pip" in done.stderr


def test_the_folder_form_runs_where_it_is_put(host: Bare, root: Path) -> None:
    (archive,) = (root / "dist").glob("*.tar.zst")
    command = ["tar", "--zstd", "--extract", "--file", str(archive)]
    subprocess.run([*command, "--directory", str(host.folder / "here"), "--transform",
                    "s/^pdnode/folder/"], check=True, timeout=100)  # fmt: skip
    done = host.run("/here/folder/pdnode", "version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"pdnode {__version__}\n")
