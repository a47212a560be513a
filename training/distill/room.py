"""What the machine has free: memory of the devices and of the host, and the disk."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes that are free; None where that is not known.

    `device` is of the device that has least. On a CPU devices take the host's memory: None.
    """

    platform: str
    num_devices: int
    device: int | None
    host: int | None
    disk: int | None


def room_here(out: Path | None) -> Room:
    """This machine's, and of the disk that holds `out` or will."""
    devices = jax.local_devices()
    platform = devices[0].platform
    device = None if platform == "cpu" else min(filter(None, map(_free_on, devices)), default=None)
    return Room(platform, len(devices), device, free_host_bytes(), _free_disk(out))


def _free_on(device: Any) -> int | None:
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def free_host_bytes() -> int | None:
    """What Linux can give without swapping and the control group allows; None where unknown."""
    known = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    group = Path("/sys/fs/cgroup")
    try:
        most = int((group / "memory.max").read_text(encoding="ascii"))
        known.append(most - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no control group, or one without a limit: "max"
        pass
    return min(known, default=None)


def _free_disk(out: Path | None) -> int | None:
    if out is None:
        return None
    place = out.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone meanwhile
            continue
    return found
