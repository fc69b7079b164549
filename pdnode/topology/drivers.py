"""GPUs as the NVIDIA driver lists them: under /proc, and by its library where cuda-python is."""

import contextlib
import importlib
from pathlib import Path
from typing import Any

from pdnode.topology.pci import normal_address
from pdnode.topology.sysfs import Sysfs, read_text

_NAME_BYTES = 96


def proc_gpus(sysfs: Sysfs) -> dict[str, str]:
    """PCI address → model, or "" where the driver does not say it."""
    base = sysfs.proc / "driver" / "nvidia" / "gpus"
    gpus = {}
    with contextlib.suppress(OSError):
        for entry in sorted(base.iterdir()):
            address = normal_address(entry.name)
            if address is not None:
                gpus[address] = _model(entry / "information")
    return gpus


def _model(path: Path) -> str:
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model":
            return value.strip()
    return ""


def driver_gpus() -> dict[str, str]:
    """As `proc_gpus`, for a container that does not show them there. Nothing without cuda-python
    or without a driver; no context is made on any GPU."""
    try:
        cuda: Any = importlib.import_module("cuda.bindings.driver")
        if _checked(cuda.cuInit(0)) is None:
            return {}
        count = _checked(cuda.cuDeviceGetCount()) or 0
        gpus = {}
        for ordinal in range(count):
            device = _checked(cuda.cuDeviceGet(ordinal))
            bus = _checked(cuda.cuDeviceGetPCIBusId(_NAME_BYTES, device))
            name = _checked(cuda.cuDeviceGetName(_NAME_BYTES, device))
            address = normal_address(_text(bus))
            if address is not None:
                gpus[address] = _text(name)
    except (ImportError, AttributeError, RuntimeError):
        return {}  # cuda-python raises RuntimeError where libcuda is absent
    return gpus


def _checked(result: tuple[Any, ...]) -> Any:  # noqa: ANN401 - cuda-python has no types
    """The value of a driver call, True if it has none, None if it failed."""
    if int(result[0]) != 0:
        return None
    return result[1] if len(result) > 1 else True


def _text(value: bytes | None) -> str:
    return (value or b"").partition(b"\0")[0].decode(errors="replace").strip()
