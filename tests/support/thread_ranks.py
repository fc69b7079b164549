"""The ranks of a TP group as threads of one process: the model's sums without its processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_TIMEOUT_S = 60.0


class _Meeting:
    """Where all ranks put something down, and take what all have put down."""

    def __init__(self, tp: int) -> None:
        self._barrier = threading.Barrier(tp, timeout=_TIMEOUT_S)
        self._given: list[Tensor] = [torch.empty(0)] * tp

    def exchange(self, rank: int, given: Tensor) -> list[Tensor]:
        self._given[rank] = given.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def leave(self) -> None:
        self._barrier.abort()


class ThreadRanks:
    """models.ranks.Ranks of one thread."""

    def __init__(self, meeting: _Meeting, *, rank: int, tp: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.tp = tp

    def sum(self, part: Tensor) -> Tensor:
        return part.copy_(torch.stack(self._meeting.exchange(self.rank, part)).sum(0))

    def joined(self, part: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, part), dim=1)

    def least(self, number: int) -> int:
        found = self._meeting.exchange(self.rank, torch.tensor(number))
        return min(int(one) for one in found)


def on_ranks(tp: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What `work` gives on every rank; the first error of any."""
    meeting = _Meeting(tp)

    def one(rank: int) -> T:
        try:
            return work(ThreadRanks(meeting, rank=rank, tp=tp))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(tp) as pool:
        futures = [pool.submit(one, rank) for rank in range(tp)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return [future.result() for future in futures]
