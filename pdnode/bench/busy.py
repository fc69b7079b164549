"""How much of some cores other processes took while something was measured, from /proc."""

import os
from collections.abc import Sequence
from pathlib import Path


class OthersMeter:
    """Counts from when it is made. `pids`: what is not "other", with its children, as this process
    is."""

    def __init__(self, pids: Sequence[int], cores: Sequence[int]) -> None:
        self._pids = [os.getpid(), *pids]
        self._cores = cores
        self._busy, self._all = _cores_ticks(cores)
        self._own = self._own_ticks()

    def ratio(self) -> float:
        """0..1 of the cores' time."""
        busy, total = _cores_ticks(self._cores)
        took = busy - self._busy - (self._own_ticks() - self._own)
        return max(0.0, took / max(1, total - self._all))

    def _own_ticks(self) -> int:
        return sum(_process_ticks(child) for pid in self._pids for child in (pid, *_children(pid)))


def _cores_ticks(cores: Sequence[int]) -> tuple[int, int]:
    """(ticks that these cores worked, all of their ticks), since boot."""
    busy = total = 0
    names = {f"cpu{core}" for core in cores}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name in names:
            user, nice, system, idle, waiting, *rest = map(int, numbers[:8])
            busy += user + nice + system + sum(rest)
            total += user + nice + system + idle + waiting + sum(rest)
    return busy, total


def _process_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
