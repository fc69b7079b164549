"""Memory of a GPU shared between processes, and what a NIC would reach it by."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdnode.memory import cudriver
from pdnode.memory.cumem import CumemRegion
from tests.gpu.conftest import Report

SIZE = (32 << 20) + 4096  # no multiple of the granularity
ROOT = Path(__file__).parents[2]


def test_memory_is_shared_between_processes() -> None:
    torch.cuda.set_device(0)
    region = CumemRegion.create(0, SIZE)
    mine = torch.as_tensor(region, device="cuda:0").view(torch.int32)
    assert mine.data_ptr() == region.address, "a copy"
    torch.arange(len(mine), dtype=torch.int32, out=mine)
    torch.cuda.synchronize()
    command = [sys.executable, "-m", "tests.gpu.other_process", str(region.fd), str(SIZE)]
    subprocess.run(command, cwd=ROOT, pass_fds=(region.fd,), check=True, timeout=120)
    wanted = torch.arange(1, len(mine) + 1, dtype=torch.int32, device="cuda:0")
    assert torch.equal(mine, wanted)
    del mine
    region.close()


def test_a_nic_can_be_given_the_memory(report: Report) -> None:
    if not cudriver.attribute(0, "DMA_BUF_SUPPORTED"):
        pytest.skip("the driver exports no dma-buf of this GPU")
    torch.cuda.set_device(0)
    region = CumemRegion.create(0, SIZE)
    fd = region.dmabuf()
    report("dma-buf", os.lseek(fd, 0, os.SEEK_END) / 2**20, "MiB exported")
    os.close(fd)
    region.close()
