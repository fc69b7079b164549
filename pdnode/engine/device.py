"""Whether this host can run the CUDA engine: looked up without importing torch.

The daemon asks before it starts a worker, so that what is missing is one line and not the trace of
a process that died. Nothing here makes a context on a GPU.
"""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

EXTRA = "pip install 'pdnode[cuda]'"
_DRIVER = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What the engine runs on, and why."""

    device: str  # cpu | cuda
    reason: str


def choose_device(missing: Callable[[], str]) -> DeviceChoice:
    """For `device = "auto"`: CUDA where nothing is missing. `missing`: `missing_for_cuda`."""
    if text := missing():
        return DeviceChoice("cpu", f"no CUDA: {text}")
    return DeviceChoice(
        "cuda", "a GPU, its driver, CUDA torch, cuda-python and FlashInfer are here"
    )


def missing_for_cuda() -> str:
    """All that the CUDA engine lacks here, in one line with what to do; empty if nothing."""
    packages = [
        name
        for name, found in (
            ("a CUDA build of torch", _torch_has_cuda()),
            ("cuda-python", _importable("cuda.bindings")),
            ("FlashInfer", _importable("flashinfer")),
        )
        if not found
    ]
    texts = [text] if (text := _driver_problem()) else []
    if packages:
        texts.append(f"not installed: {', '.join(packages)} ({EXTRA})")
    return "; ".join(texts)


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _torch_has_cuda() -> bool:
    """torch/version.py says which CUDA it was built for, and is read as text."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    try:
        text = version.read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]\d", text, re.MULTILINE) is not None


def _driver_problem() -> str:
    """Why the driver shows no GPU; empty if it does."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return f"no NVIDIA driver ({_DRIVER} is not found)"
    if code := driver.cuInit(0):
        return f"the NVIDIA driver cannot be used (cuInit answers {code})"
    count = ctypes.c_int()
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code or count.value < 1:
        return "the NVIDIA driver shows no GPU"
    return ""
