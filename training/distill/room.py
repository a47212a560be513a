"""What is free on the machine: memory of the devices and of the host, and the disk."""

import dataclasses
import shutil
from pathlib import Path

import jax

from jmoe.free_memory import free_device_bytes, free_host_bytes


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
    """Returns this machine's room, and that of the disk that holds `out` or will."""
    devices = jax.local_devices()
    platform, device = devices[0].platform, None
    if platform != "cpu":
        device = min(filter(None, map(free_device_bytes, devices)), default=None)
    disk = None if out is None else shutil.disk_usage(existing(out)).free
    return Room(platform, jax.device_count(), device, free_host_bytes(), disk)


def existing(path: Path) -> Path:
    """Returns the folder on whose disk `path` lies or will."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())


def folder_bytes(folder: Path) -> int:
    """Returns the bytes of all files below a folder; 0 where there is none."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone meanwhile
            continue
    return found
