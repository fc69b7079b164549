"""memfd regions: shared, zeroed, of a size nobody can change."""

import fcntl
import mmap
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from pdnode.memory.region import MemfdRegion, _file_bytes, available_bytes

SIZE = 3 * 4096


def test_two_mappings_share_the_bytes() -> None:
    ours = MemfdRegion.create("test", SIZE)
    theirs = MemfdRegion.adopt(os.dup(ours.fd), SIZE)
    assert bytes(ours.map()) == bytes(SIZE)
    ours.map()[SIZE - 1] = 7
    assert theirs.map()[SIZE - 1] == 7
    ours.close()
    assert theirs.map()[SIZE - 1] == 7
    theirs.close()
    theirs.close()


def test_the_size_is_sealed_and_the_descriptor_does_not_survive_exec() -> None:
    region = MemfdRegion.create("test", SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 2 * SIZE)
    assert fcntl.fcntl(region.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    region.close()


def test_the_memory_is_taken_at_once() -> None:
    region = MemfdRegion.create("test", 64 * 4096)
    assert os.fstat(region.fd).st_blocks * 512 >= 64 * 4096
    region.close()


def test_more_than_there_is_fails_in_words() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError, match="bytes for test"):
        MemfdRegion.create("test", 1 << 62)
    assert len(os.listdir("/proc/self/fd")) == before


def test_foreign_descriptors_are_refused() -> None:
    region = MemfdRegion.create("test", SIZE)
    with pytest.raises(ValueError, match=f"holds {SIZE} bytes, expected {SIZE + 1}"):
        MemfdRegion.adopt(region.fd, SIZE + 1)
    unsealed = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    with pytest.raises(ValueError, match="not sealed"):
        MemfdRegion.adopt(unsealed, SIZE)
    reader, writer = os.pipe()
    with pytest.raises(ValueError, match="not a memfd"):
        MemfdRegion.adopt(reader, SIZE)
    for fd in (unsealed, reader, writer):
        os.close(fd)
    region.close()


def test_a_view_that_is_left_keeps_the_region_open() -> None:
    region = MemfdRegion.create("test", SIZE)
    view = region.map()[:16]
    with pytest.raises(BufferError):
        region.unmap()
    view.release()
    region.close()


def test_available_memory_is_within_the_hosts() -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_bytes() <= pages


def free_huge_pages() -> int:
    """The host's, of its default size."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields.get("HugePages_Free", "0"))


def test_huge_pages_or_else_ordinary_ones() -> None:
    region = MemfdRegion.create("test", SIZE, huge_pages=True)
    huge = free_huge_pages() > 0 or region.memory_page_bytes > mmap.PAGESIZE
    assert (region.memory_page_bytes > mmap.PAGESIZE) == huge
    assert os.fstat(region.fd).st_size == (region.memory_page_bytes if huge else SIZE)
    theirs = MemfdRegion.adopt(os.dup(region.fd), SIZE)
    region.map()[SIZE - 1] = 3
    assert len(theirs.map()) == SIZE
    assert theirs.map()[SIZE - 1] == 3
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 0)
    for one in (region, theirs):
        one.close()


def test_a_file_in_huge_pages_is_longer_than_its_region() -> None:
    """Where the host has none, a stand-in whose pages are said to be huge."""
    huge = 2 << 20
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with patch("pdnode.memory.region.os.fstat") as fstat:
        fstat.return_value.st_blksize = huge
        assert [_file_bytes(fd, size) for size in (1, huge, huge + 1)] == [huge, huge, 2 * huge]
        fstat.return_value.st_blksize = 4096
        assert _file_bytes(fd, SIZE + 1) == SIZE + 1
    os.close(fd)
