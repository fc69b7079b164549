"""Makes one file of the launcher and a folder: `pack.py LAUNCHER FOLDER FILE`.

packaging/launcher.cpp says what the file looks like. The program zstd compresses.
"""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

MAGIC = "pdnode-file-1"
TRAILER_BYTES = 160
ZSTD = ("zstd", "--quiet", "--check", "--threads=0", "-12", "--long=27", "--stdout")


def index_of(folder: Path) -> tuple[str, list[Path]]:
    """A line of each file and link under `folder`, by path, and the files in this order."""
    lines, files = [], []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(map(str.isspace, name)):
            raise ValueError(f"{name!r}: the index cannot hold a name with white space")
        if path.is_symlink():
            lines.append(f"l {path.readlink()} {name}\n")
        elif path.is_file():
            status = path.stat()
            mode = 0o700 if status.st_mode & stat.S_IXUSR else 0o600
            lines.append(f"f {mode:o} {status.st_size} {name}\n")
            files.append(path)
    return "".join(lines), files


def append_files(files: list[Path], sink: BinaryIO) -> None:
    """Appends the contents of all as one frame."""
    sink.flush()
    with subprocess.Popen(ZSTD, stdin=subprocess.PIPE, stdout=sink) as zstd:
        assert zstd.stdin is not None
        for path in files:
            with path.open("rb") as source:
                shutil.copyfileobj(source, zstd.stdin, 1 << 20)
        zstd.stdin.close()
    if zstd.returncode:
        raise RuntimeError(f"zstd ended with {zstd.returncode}")
    sink.seek(0, os.SEEK_END)


def pack(launcher: Path, folder: Path, target: Path) -> None:
    """Writes `target`; what was there is replaced when the new one is whole."""
    index, files = index_of(folder)
    unpacked_bytes = sum(path.stat().st_size for path in files)
    part = target.with_name(f".{target.name}.part")
    with part.open("w+b") as sink:
        sink.write(launcher.read_bytes())
        start = sink.tell()
        append_files(files, sink)
        payload_bytes = sink.tell() - start
        frame = subprocess.run(ZSTD, input=index.encode(), stdout=subprocess.PIPE, check=True)
        sink.write(frame.stdout)
        sink.seek(start)
        digest = hashlib.file_digest(sink, "sha256").hexdigest()
        sink.seek(0, os.SEEK_END)
        trailer = f"{MAGIC} {payload_bytes} {len(frame.stdout)} {unpacked_bytes} {digest}\n"
        sink.write(trailer.encode().ljust(TRAILER_BYTES))
    part.chmod(0o755)
    part.rename(target)


if __name__ == "__main__":
    pack(*map(Path, sys.argv[1:]))
