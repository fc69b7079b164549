"""Memory that two processes share through a file descriptor.

The worker creates a region and maps it; the daemon gets the descriptor, checks it and lets the
transfer core map and register it. Everything above sees only `Region`, so that device memory
behind an exported handle can take its place.
"""

import fcntl
import mmap
import os
from pathlib import Path
from typing import Protocol, Self

import psutil

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CGROUP = Path("/sys/fs/cgroup")


class Region(Protocol):
    """One shareable piece of memory of fixed size. The owner of the object closes it."""

    @property
    def fd(self) -> int:
        """Descriptor to hand over; belongs to the region, close-on-exec."""

    @property
    def size_bytes(self) -> int: ...

    def map(self) -> memoryview:
        """The bytes, writable, shared with every other process that maps `fd`. Mapped once."""

    def unmap(self) -> None:
        """Drop the mapping; asserts that no view of it is left. Idempotent."""

    def close(self) -> None:
        """Unmap and close the descriptor. Idempotent."""


class MemfdRegion:
    """Host memory in a memfd whose size is sealed: no holder of it can make a mapping fault.

    A NIC has a table entry for each page of the kernel's, so memory that one will register is best
    in huge pages. The file is then longer than the region, by less than a huge page.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self.memory_page_bytes = os.fstat(fd).st_blksize
        self._mapping: mmap.mmap | None = None
        self._view: memoryview | None = None

    @classmethod
    def create(cls, name: str, size_bytes: int, *, huge_pages: bool = False) -> Self:
        """A new region of zeros. The memory is taken at once: MemoryError here, no SIGBUS later.

        `huge_pages`: of the host's reserve (vm.nr_hugepages); where that is too small, of ordinary
        pages. `memory_page_bytes` says which.
        """
        assert size_bytes > 0, size_bytes
        if huge_pages and (fd := _huge_memfd(name, size_bytes)) is not None:
            return cls(fd, size_bytes)
        # Asked for more than there is, the kernel goes on until it must kill somebody.
        if size_bytes > (free := available_bytes()):
            raise MemoryError(f"{size_bytes} bytes for {name}: only {free} are free")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _fill(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise MemoryError(f"{size_bytes} bytes for {name}: {error.strerror}") from error
        return cls(fd, size_bytes)

    @classmethod
    def adopt(cls, fd: int, size_bytes: int) -> Self:
        """Take over a descriptor from another process. ValueError if it is no such region."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ValueError(f"descriptor {fd} is not a memfd") from error
        actual = os.fstat(fd).st_size
        if actual not in (size_bytes, _file_bytes(fd, size_bytes)):
            raise ValueError(f"region holds {actual} bytes, expected {size_bytes}")
        if seals & _SEALS != _SEALS:
            raise ValueError("the region's size is not sealed")
        return cls(fd, size_bytes)

    @property
    def fd(self) -> int:
        assert self._fd >= 0, "region is closed"
        return self._fd

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def map(self) -> memoryview:
        if self._view is None:
            length = os.fstat(self.fd).st_size
            self._mapping = mmap.mmap(self.fd, length, mmap.MAP_SHARED)
            self._view = memoryview(self._mapping)[: self._size_bytes]
        return self._view

    def unmap(self) -> None:
        if self._view is not None and self._mapping is not None:
            self._view.release()
            self._mapping.close()
            self._view = self._mapping = None

    def close(self) -> None:
        self.unmap()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _fill(fd: int, size_bytes: int) -> None:
    """OSError if there is not so much."""
    os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def _file_bytes(fd: int, size_bytes: int) -> int:
    """A file in huge pages has a whole number of them."""
    page = os.fstat(fd).st_blksize
    return size_bytes if page <= mmap.PAGESIZE else -(-size_bytes // page) * page


def _huge_memfd(name: str, size_bytes: int) -> int | None:
    """None where the host has no huge pages, or not enough free ones."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError:
        return None
    try:
        _fill(fd, _file_bytes(fd, size_bytes))
    except OSError:
        os.close(fd)
        return None
    return fd


def available_bytes() -> int:
    """Memory that this process may still take: what the host has, within the cgroup's limit."""
    free: int = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
