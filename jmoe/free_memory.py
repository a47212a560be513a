"""Memory that is left, of a device and of the host."""

from pathlib import Path
from typing import Any, NamedTuple


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes."""

    limit: int  # that XLA may take
    in_use: int  # weights, and whatever else lies there

    @property
    def free(self) -> int:
        """What XLA may still take."""
        return self.limit - self.in_use


def device_memory(device: Any) -> DeviceMemory | None:
    """Returns what a `jax.Device` reports about its memory; None where it reports nothing."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return DeviceMemory(stats["bytes_limit"], stats.get("bytes_in_use", 0))


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
