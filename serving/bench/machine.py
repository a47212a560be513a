"""What else the machine did while something was measured on it. No jax."""

import os
from pathlib import Path


class Watch:
    """Measures, from when it is made, the share of processor time that other programs take."""

    def __init__(self, server_pid: int) -> None:
        self._pids = (os.getpid(), server_pid)
        self._start = self._ticks()

    def others(self) -> float | None:
        """Returns the share of all processors that neither this process nor the server took.

        None without /proc. Other guests of the same host do not show in it.
        """
        now = self._ticks()
        if self._start is None or now is None or now[1] <= self._start[1]:
            return None
        return max(0.0, (now[0] - self._start[0]) / (now[1] - self._start[1]))

    def _ticks(self) -> tuple[int, int] | None:
        """Returns the clock ticks spent on other programs, and all ticks."""
        try:
            total = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
            ours = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in self._pids]
        except OSError:
            return None
        idle = total[3] + total[4]  # and waiting for a disk
        mine = sum(int(ticks) for stat in ours for ticks in stat.split()[11:13])
        return sum(total) - idle - mine, sum(total)
