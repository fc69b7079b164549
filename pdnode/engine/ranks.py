"""The ranks of a TP group joined by torch.distributed."""

import os
from datetime import timedelta

import torch
import torch.distributed as group
from torch import Tensor

# The ranks of a group are on one host: nobody shall listen on another interface.
_LOOPBACK = "lo"
_TIMEOUT = timedelta(minutes=30)  # of the meeting and of each exchange


class JoinedRanks:
    """models.ranks.Ranks over a process group; the only one of this process."""

    def __init__(self, *, rank: int, tp: int, device: torch.device) -> None:
        """`device`: where what is exchanged lies."""
        self._rank = rank
        self._tp = tp
        self._device = device

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def tp(self) -> int:
        return self._tp

    def sum(self, part: Tensor) -> Tensor:
        group.all_reduce(part)
        return part

    def joined(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self._tp)]
        group.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=1)

    def least(self, number: int) -> int:
        found = torch.tensor(number, dtype=torch.int64, device=self._device)
        group.all_reduce(found, group.ReduceOp.MIN)
        return int(found)


def join(*, rank: int, tp: int, store_fd: int, device: torch.device) -> JoinedRanks:
    """Meet the other ranks over the memfd `store_fd`, which all of them hold. Called once. They
    exchange by gloo, or by NCCL where `device` is a GPU.

    RuntimeError if one of them does not come, or leaves. The daemon ends all ranks once one has
    died, long before an exchange times out.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _LOOPBACK
    on_gpu = device.type == "cuda"
    # By this path, and not by a file's, nothing is left behind by a group that is killed.
    store = group.FileStore(f"/proc/self/fd/{store_fd}", tp)  # type: ignore[attr-defined]
    group.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=tp,
        timeout=_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    return JoinedRanks(rank=rank, tp=tp, device=device)
