"""What else the machine did, and how fast it was, while something was measured on it. No jax."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

WORK_S = 0.25
"""Long enough to see a neighbour on the same cores, short enough to do before and after a run."""


class Seen(NamedTuple):
    """While something was measured."""

    others: float | None
    """Share of processor time that neither this process nor the server took; None: no /proc."""
    work_per_s: float  # fixed pieces of work that the idle machine did, before and after; mean


class Watch:
    """Begins before what is measured, while the server is idle; `seen` ends it.

    Other programs show in the shares of processor time. Other guests of the same host do not, nor
    does a lower clock: the same work merely takes longer.
    """

    def __init__(self, server_pid: int) -> None:
        self._pids = (os.getpid(), server_pid)
        self._work_per_s = work_per_s()
        self._start = self._ticks()

    def seen(self) -> Seen:
        """Since this object was made."""
        now = self._ticks()
        work = (self._work_per_s + work_per_s()) / 2
        if self._start is None or now is None or now[1] <= self._start[1]:
            return Seen(None, work)
        return Seen(max(0.0, (now[0] - self._start[0]) / (now[1] - self._start[1])), work)

    def _ticks(self) -> tuple[int, int] | None:
        """Busy with others, and all there were."""
        try:
            total = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
            ours = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in self._pids]
        except OSError:
            return None
        idle = total[3] + total[4]  # and waiting for a disk
        mine = sum(int(ticks) for stat in ours for ticks in stat.split()[11:13])
        return sum(total) - idle - mine, sum(total)


def work_per_s(clock: Callable[[], float] = time.perf_counter) -> float:
    """Matrix products of one fixed size that this machine does in a second, as a rate."""
    matrix = np.ones((256, 256), np.float32)
    start, count = clock(), 0
    while (elapsed := clock() - start) < WORK_S:
        np.matmul(matrix, matrix)
        count += 1
    return count / elapsed
