"""The other process of test_gpu_memory.py: `-m tests.gpu.other_process FD SIZE`."""

import sys

import torch

from pdnode.memory.cumem import CumemRegion


def main() -> None:
    """Takes over the memory, checks what is in it, and adds one to all of it."""
    fd, size = map(int, sys.argv[1:])
    region = CumemRegion.adopt(fd, size, 0)
    seen = torch.as_tensor(region, device="cuda:0").view(torch.int32)
    assert torch.equal(seen, torch.arange(len(seen), dtype=torch.int32, device="cuda:0"))
    seen += 1
    torch.cuda.synchronize()
    del seen
    region.close()


if __name__ == "__main__":
    main()
