"""The head of the single file (packaging/launcher.cpp), with a small program instead of ours."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hosts import needs_namespaces

pytestmark = pytest.mark.timeout(120)

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
HOST_LACKS = 71
SAYS = '#!/bin/sh\nread -r found < "${0%/*}/lib/data"\necho "$found" "$@" "${WORD-unset}"\n'


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launcher") / "launcher"
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-static", "-o", str(path)]
    subprocess.run([*command, str(PACKAGING / "launcher.cpp"), "-lzstd"], check=True, timeout=100)
    return path


def pack(launcher: Path, folder: Path, target: Path) -> None:
    command = [sys.executable, str(PACKAGING / "pack.py"), str(launcher), str(folder), str(target)]
    subprocess.run(command, check=True, timeout=60)


@pytest.fixture(scope="module")
def single(launcher: Path) -> Path:
    """A file whose program prints its second file, its arguments and $WORD."""
    folder = launcher.parent / "folder"
    (folder / "lib").mkdir(parents=True)
    (folder / "pdnode").write_text(SAYS)
    (folder / "pdnode").chmod(0o755)
    (folder / "lib" / "data").write_text("seen\n")
    (folder / "lib" / "large").write_bytes(os.urandom(3 << 20))
    (folder / "lib" / "same").symlink_to("large")
    path = launcher.parent / "pdnode"
    pack(launcher, folder, path)
    return path


def run(
    single: Path, cache: Path | None, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    named = {"PDNODE_CACHE": str(cache)} if cache else {}
    return subprocess.run(
        [str(single), *arguments], env=named | (env or {}), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def copy_in(cache: Path) -> Path:
    (found,) = [path for path in cache.iterdir() if path.is_dir()]
    return found


def test_unpacks_once_and_hands_on_arguments_and_environment(single: Path, tmp_path: Path) -> None:
    first = run(single, tmp_path, "a b", "--c", env={"WORD": "w"})
    assert (first.returncode, first.stdout) == (0, "seen a b --c w\n")
    assert "unpacking into" in first.stderr
    copy = copy_in(tmp_path)
    assert copy.stat().st_mode & 0o777 == 0o700
    assert (copy / "lib" / "same").readlink() == Path("large")
    node = copy.stat().st_ino
    second = run(single, tmp_path)
    assert (second.stdout, second.stderr) == ("seen unset\n", "")
    assert copy.stat().st_ino == node


def test_many_starts_at_once_make_one_copy(single: Path, tmp_path: Path) -> None:
    env = {"PDNODE_CACHE": str(tmp_path)}
    starts = [
        subprocess.Popen([single], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(6)
    ]
    said = [start.communicate(timeout=60) for start in starts]
    assert [out for out, _ in said] == [b"seen unset\n"] * 6
    assert sum(b"unpacking" in err for _, err in said) == 1
    assert len(list(tmp_path.iterdir())) == 2, "the copy and its lock"


def cut(copy: Path) -> None:
    os.truncate(copy / "lib" / "large", 1000)


def change_in_place(copy: Path) -> None:
    with (copy / "lib" / "large").open("r+b") as file:
        file.write(b"other")


def add_write_mode(copy: Path) -> None:
    (copy / "lib" / "data").chmod(0o666)


def turn_link(copy: Path) -> None:
    (copy / "lib" / "same").unlink()
    (copy / "lib" / "same").symlink_to("data")


def open_to_others(copy: Path) -> None:
    copy.chmod(0o777)


def replace_by_file(copy: Path) -> None:
    shutil.rmtree(copy)
    copy.write_text("not a folder")


DAMAGES = (
    cut, change_in_place, add_write_mode, turn_link, open_to_others, replace_by_file,
    lambda copy: (copy / "pdnode").unlink(), lambda copy: shutil.rmtree(copy / "lib"),
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_made_anew(
    damage: Callable[[Path], None], single: Path, tmp_path: Path
) -> None:
    run(single, tmp_path)
    copy = copy_in(tmp_path)
    damage(copy)
    mended = run(single, tmp_path)
    assert (mended.returncode, mended.stdout) == (0, "seen unset\n")
    assert "is damaged (" in mended.stderr
    assert (copy / "lib" / "large").stat().st_size == 3 << 20
    assert copy.stat().st_mode & 0o777 == 0o700
    assert run(single, tmp_path).stderr == ""


def test_what_a_killed_start_left_is_replaced(single: Path, tmp_path: Path) -> None:
    run(single, tmp_path)
    copy = copy_in(tmp_path)
    part = copy.with_name(f"{copy.name}.part")
    copy.rename(part)
    (part / "pdnode").write_text("#!/bin/sh\necho half\n")
    done = run(single, tmp_path)
    assert done.stdout == "seen unset\n"
    assert not part.exists()


def test_another_file_has_another_copy(single: Path, launcher: Path, tmp_path: Path) -> None:
    run(single, tmp_path)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "pdnode").write_text("#!/bin/sh\necho new\n")
    (tmp_path / "new" / "pdnode").chmod(0o755)
    pack(launcher, tmp_path / "new", tmp_path / "other")
    assert run(tmp_path / "other", tmp_path).stdout == "new\n"
    assert run(single, tmp_path).stderr == "", "the first copy is still there"


@pytest.mark.parametrize("where", [0.5, 0.9])
def test_a_file_with_a_wrong_byte_is_not_run(single: Path, where: float, tmp_path: Path) -> None:
    data = bytearray(single.read_bytes())
    data[len(data) - (3 << 20) + int(where * (3 << 20))] ^= 1  # in the payload
    wrong = tmp_path / "wrong"
    wrong.write_bytes(data)
    wrong.chmod(0o755)
    (tmp_path / "cache").mkdir()
    done = run(wrong, tmp_path / "cache")
    assert (done.returncode, done.stdout) == (HOST_LACKS, "")
    assert "damaged" in done.stderr
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_an_index_that_asks_for_more_than_there_is(
    single: Path, launcher: Path, tmp_path: Path
) -> None:
    script = "import pack, pathlib, sys; told = pack.index_of; pack.index_of = lambda folder: ("
    script += "told(folder)[0].replace('f 600 5 ', 'f 600 6 '), told(folder)[1]); "
    script += "pack.pack(*map(pathlib.Path, sys.argv[1:]))"
    command = [sys.executable, "-c", script, str(launcher), str(single.parent / "folder")]
    wrong = tmp_path / "wrong"
    subprocess.run([*command, str(wrong)], cwd=PACKAGING, check=True, timeout=60)
    done = run(wrong, tmp_path)
    assert (done.returncode, done.stdout) == (HOST_LACKS, "")
    assert "damaged" in done.stderr


def test_a_file_that_was_cut_short_is_not_run(single: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(single.read_bytes()[: -(1 << 20)])
    short.chmod(0o755)
    done = run(short, tmp_path)
    assert (done.returncode, done.stdout) == (HOST_LACKS, "")
    assert "cut short" in done.stderr


def test_a_folder_that_others_may_write_to_is_refused(single: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    done = run(single, tmp_path)
    assert done.returncode == HOST_LACKS
    assert f"PDNODE_CACHE: {tmp_path}: others may write to it" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_relative_folder_is_refused(single: Path) -> None:
    done = run(single, Path("here"))
    assert done.returncode == HOST_LACKS
    assert "here: not an absolute path" in done.stderr


def test_systemds_cache_directory_is_taken(single: Path, tmp_path: Path) -> None:
    first = tmp_path / "unit"
    done = run(single, None, env={"CACHE_DIRECTORY": f"{first}:{tmp_path / 'second'}"})
    assert done.returncode == 0
    assert copy_in(first).is_dir()


def mounted(single: Path, script: str, *env: str) -> subprocess.CompletedProcess[str]:
    """Runs it with mounts of its own."""
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{script}; exec env -i {" ".join(env)} "$0"', single],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@needs_namespaces
@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "HOME"])
def test_the_users_cache_is_next(single: Path, name: str, tmp_path: Path) -> None:
    done = mounted(single, "mount -t tmpfs -o ro none /var/cache", f"{name}={tmp_path}")
    assert done.stdout == "seen unset\n", done.stderr
    assert copy_in(tmp_path / ".cache" / "pdnode" if name == "HOME" else tmp_path / "pdnode")


@needs_namespaces
def test_all_that_was_tried_is_told(single: Path) -> None:
    done = mounted(single, "mount -t tmpfs -o ro none /var/cache")
    assert done.returncode == HOST_LACKS
    assert "PDNODE_CACHE" in done.stderr
    assert "/var/cache/pdnode: Read-only file system" in done.stderr


@needs_namespaces
def test_no_room_is_told_before_anything_is_written(single: Path, tmp_path: Path) -> None:
    script = f"mount -t tmpfs -o size=8m,mode=755 none {tmp_path}"
    done = mounted(single, script, f"PDNODE_CACHE={tmp_path}")
    assert done.returncode == HOST_LACKS
    assert f"takes 19 MiB in {tmp_path}, where 8 MiB are free" in done.stderr


@needs_namespaces
def test_a_folder_that_nothing_may_run_from_is_named(single: Path, tmp_path: Path) -> None:
    script = f"mount -t tmpfs -o noexec,mode=755 none {tmp_path}"
    done = mounted(single, script, f"PDNODE_CACHE={tmp_path}")
    assert done.returncode == HOST_LACKS
    assert "noexec" in done.stderr
