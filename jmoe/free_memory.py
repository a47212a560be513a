"""Memory that is left, of a device and of the host."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes."""

    limit: int  # that XLA may take
    in_use: int  # weights, and whatever else lies there
    wanted: int = 0  # what XLA asked for, where other processes left it less; 0: it has it

    @property
    def free(self) -> int:
        """What XLA may still take."""
        return self.limit - self.in_use


def device_memory(device: Any) -> DeviceMemory | None:
    """Returns what a `jax.Device` reports about its memory; None where it reports nothing.

    XLA takes its part of a GPU with the first array, and less of it where other processes have some
    (nine tenths, again and again). `bytes_limit` is what it asked for, `pool_bytes` what it got.
    """
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    wanted = stats["bytes_limit"]
    if takes_all_at_once() and "pool_bytes" in stats:
        if not stats["pool_bytes"]:
            _touch(device)
            stats = device.memory_stats()
        limit = min(wanted, stats["pool_bytes"] or wanted)
    else:
        limit = wanted
    return DeviceMemory(limit, stats.get("bytes_in_use", 0), wanted if limit < wanted else 0)


def takes_all_at_once() -> bool:
    """Returns whether XLA takes its part of a GPU with the first array, as it does unless the
    environment says otherwise.
    """
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    grows = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0")
    return allocator in ("default", "bfc") and not grows


def _touch(device: Any) -> None:
    jax.device_put(np.uint8(0), device).block_until_ready()


def free_device_bytes(device: Any) -> int | None:
    """Returns the bytes of a `jax.Device` that XLA may still take; None where it does not say."""
    memory = device_memory(device)
    return None if memory is None else memory.free


def free_host_bytes() -> int | None:
    """Returns the bytes that Linux has without swapping and the control group allows, which gives
    those of files it read back; None if unknown.
    """
    known = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    group = Path("/sys/fs/cgroup")
    try:
        most = int((group / "memory.max").read_text(encoding="ascii"))
        taken = int((group / "memory.current").read_text(encoding="ascii"))
        known.append(most - taken + _inactive_file_bytes(group / "memory.stat"))
    except (OSError, ValueError):  # no control group, or one without a limit: "max"
        pass
    return min(known, default=None)


def _inactive_file_bytes(path: Path) -> int:
    try:
        counts = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
        return int(counts["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0
