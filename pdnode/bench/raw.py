"""The bare libfabric loop (`native/raw_loop.c`), by ctypes: one end of it on one NIC.

The compiled file lies beside the compiled core, which in an editable install is not beside the
sources; its module spec knows where. Calls release the GIL.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdnode.engine.protocol import COUNTER_OFFSET, SLEEPING_OFFSET
from pdnode.errors import PdnodeError

Pages = npt.NDArray[np.uint32]

ADDRESS_BYTES = 128
WINDOWS = (16, 64, 256)
GATHERS = (1, 4)
"""Pages an operation. More than four segments fail late on tcp."""


class _Call(Protocol):
    def __call__(self, *arguments: object) -> int: ...


@cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("pdnode.bench._raw_loop")
    if spec is None or spec.origin is None:
        raise PdnodeError("the bare loop is not built: run `make setup`")
    library = ctypes.CDLL(spec.origin)
    library.raw_new.restype = ctypes.c_void_p
    library.raw_failed.restype = ctypes.c_char_p
    library.raw_send.restype = ctypes.c_int64
    return library


class RawEnd:
    """`memory`: the caller's buffer, registered whole under `key`; it must outlive the end.

    Raises PdnodeError that names the libfabric call and its code.
    """

    def __init__(
        self, *, library: str, rdm: bool, host: str, memory: npt.NDArray[np.uint8], key: int
    ) -> None:
        self._end = ctypes.c_void_p(_library().raw_new())
        assert self._end.value is not None, "out of memory"
        self._call(
            "open", library.encode(), b"tcp", int(rdm), host.encode(),
            ctypes.c_void_p(memory.ctypes.data), ctypes.c_uint64(memory.nbytes),
            ctypes.c_uint64(key),
        )  # fmt: skip

    def address(self) -> bytes:
        """Of the endpoint (RDM), or of a listener that this opens (MSG)."""
        address = ctypes.create_string_buffer(ADDRESS_BYTES)
        size = ctypes.c_size_t(ADDRESS_BYTES)
        self._call("address", address, ctypes.byref(size))
        return address.raw[: size.value]

    def accept(self) -> None:
        """MSG: take one connection request; waits 10 s."""
        self._call("accept")

    def connect(self, address: bytes) -> None:
        """MSG: connect, at most 10 s; RDM: know the peer."""
        self._call("connect", address, ctypes.c_size_t(len(address)))

    def send(
        self,
        *,
        key: int,
        source: Pages,
        target: Pages,
        passes: int,
        page_bytes: int,
        window: int,
        gather: int,
    ) -> int:
        """Write page source[i] to target[i], all of them `passes` times; the nanoseconds."""
        return self._call(
            "send", ctypes.c_uint64(key), ctypes.c_void_p(source.ctypes.data),
            ctypes.c_void_p(target.ctypes.data), len(source), passes,
            ctypes.c_uint64(page_bytes), window, gather,
        )  # fmt: skip

    def receive(self, units: int) -> None:
        """Poll until the immediates of this many pages have arrived."""
        self._call("receive", ctypes.c_uint64(units))

    def share_core(self) -> None:
        """Give way to other loops whenever there is nothing to do."""
        _library().raw_share_core(self._end)

    def close(self) -> None:
        _library().raw_close(self._end)

    def _call(self, name: str, *arguments: object) -> int:
        call: _Call = getattr(_library(), f"raw_{name}")
        code = int(call(self._end, *arguments))
        if code < 0:
            where = _library().raw_failed(self._end).decode()
            raise PdnodeError(f"the bare loop failed in {where}: libfabric code {code}")
        return code


def raise_periodically(
    *, page: npt.NDArray[np.uint8], wake_fd: int, period_ns: int, stored: npt.NDArray[np.int64]
) -> None:
    """Raise the layer counter of `page` once per entry of `stored`, which gets the times."""
    start = page.ctypes.data
    _library().raise_periodically(
        ctypes.c_void_p(start + COUNTER_OFFSET), ctypes.c_void_p(start + SLEEPING_OFFSET), wake_fd,
        ctypes.c_uint64(len(stored)), ctypes.c_int64(period_ns),
        ctypes.c_void_p(stored.ctypes.data),
    )  # fmt: skip


def configurations() -> Sequence[tuple[int, int]]:
    """(window, pages an operation) that are tried; the best of them is the reference."""
    return [(window, gather) for gather in GATHERS for window in WINDOWS]
