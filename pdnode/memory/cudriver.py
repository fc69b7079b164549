"""The calls of the CUDA driver that we make, typed, through cuda-python.

CUDA is imported by the first call and never before: pdnode works without it. Addresses, handles and
streams are plain numbers here. Every failure is a CudaError with the call and the result's name.
"""

import functools
import importlib
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pdnode.errors import DeviceMissing

_PCI_ADDRESS = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(\.[0-7])?")
_NAME_BYTES = 256
_PCI_BYTES = 32
_ORDERED_FOR_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
_FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_HOST_PORTABLE, _HOST_DEVICEMAP = 1, 2  # CU_MEMHOSTREGISTER_…


class CudaError(DeviceMissing):
    """A call of the driver failed, or package, driver or GPU is missing. `result`: its CUresult."""

    def __init__(self, text: str, result: str = "") -> None:
        super().__init__(text)
        self.result = result


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as this process sees it. `ordinal` is the driver's and torch's number of it."""

    ordinal: int
    name: str
    pci: str  # as sysfs writes it
    uuid: str  # "GPU-…", as nvidia-smi writes it


@functools.cache
def bindings() -> ModuleType:
    """cuda-python's module of the driver, initialized. CudaError in words where a part is missing.

    Not to be called in a process that forks afterwards.
    """
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        text = f'cuda-python cannot be imported ({error}); pip install "pdnode[cuda]" has it'
        raise CudaError(text) from error
    try:
        _values("cuInit", module.cuInit(0), module)
    except RuntimeError as error:  # cuda-python's own, where it finds no libcuda.so.1
        raise CudaError(f"the CUDA driver cannot be loaded: {error}") from error
    return module


def call(name: str, *arguments: object) -> Any:  # noqa: ANN401 - cuda-python has no types
    """One call by its name in the driver's manual; what it gives back besides the result.

    None, the value, or a tuple where there are several.
    """
    module = bindings()
    return _values(name, getattr(module, name)(*arguments), module)


def _values(name: str, answer: tuple[Any, ...], module: ModuleType) -> Any:  # noqa: ANN401
    result, *values = answer
    if result != module.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{name}: {result.name}", result.name)
    return values[0] if len(values) == 1 else tuple(values) or None


# GPUs


def gpu_count() -> int:
    return int(call("cuDeviceGetCount"))


def gpu(ordinal: int) -> Gpu:
    """CudaError if there is none of this number."""
    device = call("cuDeviceGet", ordinal)
    uuid = bytes(call("cuDeviceGetUuid", device).bytes).hex()
    return Gpu(
        ordinal,
        _text(call("cuDeviceGetName", _NAME_BYTES, device)),
        _text(call("cuDeviceGetPCIBusId", _PCI_BYTES, device)).lower(),
        "GPU-" + "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])),
    )


def find_gpu(name: str) -> Gpu:
    """A GPU by PCI address, UUID ("GPU-…") or number. CudaError names those that there are."""
    found = [gpu(ordinal) for ordinal in range(gpu_count())]
    if _PCI_ADDRESS.fullmatch(name):
        wanted = _pci_numbers(name)
        matching = [one for one in found if _pci_numbers(one.pci) == wanted]
    else:
        matching = [one for one in found if name in (one.uuid, str(one.ordinal))]
    if not matching:
        known = ", ".join(f"{one.pci} ({one.uuid})" for one in found)
        raise CudaError(f"no GPU {name} is visible here; there are: {known}")
    return matching[0]


def _pci_numbers(address: str) -> list[int]:
    """Domain, bus, device and function; nvidia-smi writes the domain with eight digits."""
    whole = address if "." in address else f"{address}.0"
    return [int(part, 16) for part in re.split("[:.]", whole)]


def attribute(ordinal: int, name: str) -> int:
    """CU_DEVICE_ATTRIBUTE_`name` of a GPU."""
    kinds = bindings().CUdevice_attribute
    kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", kind, call("cuDeviceGet", ordinal)))


def use(ordinal: int) -> None:
    """Make the GPU's primary context, which torch uses as well, current on this thread."""
    context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))
    call("cuCtxSetCurrent", context)


def let_go(ordinal: int) -> None:
    """Once per `use`."""
    call("cuDevicePrimaryCtxRelease", call("cuDeviceGet", ordinal))


# memory that is created, shared, reserved for and mapped apart


def properties(ordinal: int) -> object:
    """Pinned memory of this GPU that can be exported as a descriptor, and reached by a NIC where
    GPU and driver can do so."""
    module = bindings()
    wanted = module.CUmemAllocationProp()
    wanted.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = _fd_type(module)
    wanted.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    # Asked for where it is not there, it fails the creation.
    rdma = attribute(ordinal, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
    wanted.allocFlags.gpuDirectRDMACapable = int(rdma != 0)
    return wanted


def _fd_type(module: ModuleType) -> object:
    return module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def granularity(ordinal: int) -> int:
    """Sizes and addresses of such memory are multiples of it."""
    option = bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(call("cuMemGetAllocationGranularity", properties(ordinal), option))


def create(ordinal: int, size_bytes: int) -> int:
    """A handle of new memory; its content is undefined."""
    try:
        return int(call("cuMemCreate", size_bytes, properties(ordinal), 0))
    except CudaError as error:
        text = f"{error} for {size_bytes} bytes of GPU {gpu(ordinal).pci}"
        raise CudaError(text, error.result) from error


def export_fd(handle: int) -> int:
    """A new descriptor for another process; the memory lives as long as it."""
    return int(call("cuMemExportToShareableHandle", handle, _fd_type(bindings()), 0))


def import_fd(fd: int) -> int:
    """A handle of the memory behind a descriptor, which stays open."""
    return int(call("cuMemImportFromShareableHandle", fd, _fd_type(bindings())))


def release(handle: int) -> None:
    """The memory goes once it is unmapped, here and elsewhere, and no descriptor of it is left."""
    call("cuMemRelease", handle)


def reserve(size_bytes: int) -> int:
    return int(call("cuMemAddressReserve", size_bytes, 0, 0, 0))


def unreserve(address: int, size_bytes: int) -> None:
    call("cuMemAddressFree", address, size_bytes)


def map_memory(address: int, size_bytes: int, handle: int) -> None:
    """Nobody may touch it before `give_access`."""
    call("cuMemMap", address, size_bytes, 0, handle, 0)


def unmap_memory(address: int, size_bytes: int) -> None:
    call("cuMemUnmap", address, size_bytes)


def give_access(address: int, size_bytes: int, ordinal: int | None) -> None:
    """Let a GPU read and write the mapping; None: the CPU, which most GPUs refuse."""
    module = bindings()
    kinds = module.CUmemLocationType
    access = module.CUmemAccessDesc()
    access.flags = module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    access.location.type = (
        kinds.CU_MEM_LOCATION_TYPE_HOST if ordinal is None else kinds.CU_MEM_LOCATION_TYPE_DEVICE
    )
    access.location.id = 0 if ordinal is None else ordinal
    call("cuMemSetAccess", address, size_bytes, [access], 1)


def dmabuf(address: int, size_bytes: int) -> int:
    """A new descriptor by which a NIC reaches the mapping."""
    kind = bindings().CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    return int(call("cuMemGetHandleForAddressRange", address, size_bytes, kind, 0))


# what NICs write to the mapping; `flush_nic_writes` needs `use` on its thread


def orders_nic_writes(ordinal: int) -> bool:
    """Whether a pass that begins after a NIC's completion was seen sees what the NIC wrote."""
    return attribute(ordinal, "GPU_DIRECT_RDMA_WRITES_ORDERING") >= _ORDERED_FOR_OWNER


def can_flush_nic_writes(ordinal: int) -> bool:
    return bool(attribute(ordinal, "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS") & _FLUSH_BY_HOST)


def flush_nic_writes() -> None:
    """What NICs have written is there for passes of the current GPU that begin from now on."""
    module = bindings()
    targets = module.CUflushGPUDirectRDMAWritesTarget
    scopes = module.CUflushGPUDirectRDMAWritesScope
    call(
        "cuFlushGPUDirectRDMAWrites",
        targets.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
        scopes.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
    )


# host memory and copies: these need `use` on their thread


def register_host(address: int, size_bytes: int) -> None:
    """Pin host memory, for copies that do not wait and for kernels that write to it."""
    call("cuMemHostRegister", address, size_bytes, _HOST_PORTABLE | _HOST_DEVICEMAP)


def unregister_host(address: int) -> None:
    call("cuMemHostUnregister", address)


def host_pointer(address: int) -> int:
    """Where a kernel finds registered host memory."""
    return int(call("cuMemHostGetDevicePointer", address, 0))


def copy_to_host(*, host: int, device: int, size_bytes: int, stream: int) -> None:
    call("cuMemcpyDtoHAsync", host, device, size_bytes, stream)


def copy_to_device(*, device: int, host: int, size_bytes: int, stream: int) -> None:
    call("cuMemcpyHtoDAsync", device, host, size_bytes, stream)


def synchronize(stream: int) -> None:
    call("cuStreamSynchronize", stream)


def _text(padded: bytes) -> str:
    return padded.split(b"\0", 1)[0].decode()
