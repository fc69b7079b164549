"""The layer counter of a GPU: a kernel that the worker launches where a CPU would raise a layer.

It adds one to a number in device memory and stores the sum to host memory that the daemon maps as
well. A store that a CUDA graph records would repeat one frozen value; the kernel, replayed, counts.
It is compiled when the worker starts, by NVRTC, so that building pdnode needs no CUDA compiler.
"""

import ctypes
import importlib
import struct
from collections.abc import Callable
from typing import Any

from pdnode.engine.protocol import COUNTER_OFFSET, COUNTER_PAGE_BYTES, SILENT_OFFSET
from pdnode.memory import cudriver
from pdnode.memory.cudriver import CudaError
from pdnode.memory.region import MemfdRegion

NAME = "raise_layer"
# One thread. What the kernels before it wrote is there when it starts; the fence puts all of it
# before the store, for host and NICs too.
SOURCE = """
extern "C" __global__ void raise_layer(unsigned long long* count,
                                       volatile unsigned long long* shown) {
  const unsigned long long sum = *count + 1;
  *count = sum;
  __threadfence_system();
  *shown = sum;
}
"""


def compile_kernel(architecture: str) -> bytes:
    """`SOURCE` for an architecture: code for "sm_…", PTX, which is text, for "compute_…".

    CudaError, with the compiler's log, if it cannot be compiled or NVRTC is missing.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        program = _checked("nvrtcCreateProgram", nvrtc, SOURCE.encode(), b"counter.cu", 0, [], [])
        options = [f"--gpu-architecture={architecture}".encode()]
        try:
            _checked("nvrtcCompileProgram", nvrtc, program, len(options), options)
        except CudaError as error:
            log = bytearray(_checked("nvrtcGetProgramLogSize", nvrtc, program))
            _checked("nvrtcGetProgramLog", nvrtc, program, log)
            said = log.decode(errors="replace").rstrip("\0\n")
            raise CudaError(f"{error}: {said}") from None
        if architecture.startswith("compute"):
            code = bytearray(_checked("nvrtcGetPTXSize", nvrtc, program))
            _checked("nvrtcGetPTX", nvrtc, program, code)
        else:
            code = bytearray(_checked("nvrtcGetCUBINSize", nvrtc, program))
            _checked("nvrtcGetCUBIN", nvrtc, program, code)
        _checked("nvrtcDestroyProgram", nvrtc, program)
    except ImportError as error:
        raise CudaError(f"cuda-python cannot be imported: {error}") from error
    except RuntimeError as error:  # cuda-python's own, where it finds no library
        raise CudaError(f"NVRTC cannot be loaded: {str(error).splitlines()[0]}") from error
    return bytes(code)


def _checked(name: str, nvrtc: Any, *arguments: object) -> Any:  # noqa: ANN401
    result, *values = getattr(nvrtc, name)(*arguments)
    if int(result) != 0:
        raise CudaError(f"{name}: {result.name}", result.name)
    return values[0] if values else None


def architecture_of(ordinal: int) -> str:
    """That of a GPU, as NVRTC names it."""
    major, minor = (
        cudriver.attribute(ordinal, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR")
    )
    return f"sm_{major}{minor}"


class KernelCounter:
    """The raising side of a counter page, on a GPU. Lives as long as the worker's process."""

    def __init__(
        self,
        page: MemfdRegion,
        ordinal: int,
        *,
        count_address: int,
        stream: Callable[[], int],
        code: bytes,
    ) -> None:
        """`count_address`: 8 bytes of zeros in the memory of GPU `ordinal`, which nobody else
        writes. `stream`: that of the passes. `code`: of `compile_kernel`.

        Marks the page as one whose raise wakes nobody.
        """
        cudriver.use(ordinal)
        self._page = page
        view = page.map()
        struct.pack_into("<I", view, SILENT_OFFSET, 1)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(view))
        cudriver.register_host(address, COUNTER_PAGE_BYTES)
        shown = cudriver.host_pointer(address) + COUNTER_OFFSET
        self._stream = stream
        self._arguments = ((count_address, shown), (ctypes.c_void_p, ctypes.c_void_p))
        self._module = cudriver.call("cuModuleLoadData", code)
        self._kernel = cudriver.call("cuModuleGetFunction", self._module, NAME.encode())

    def raise_layer(self) -> None:
        """Launch the kernel, or record it where the stream is recorded."""
        cudriver.call(
            "cuLaunchKernel", self._kernel, 1, 1, 1, 1, 1, 1, 0, self._stream(), self._arguments, 0
        )
