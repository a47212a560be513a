"""Compiled step programs on disk, so that a warm start neither traces nor lowers them.

XLA's own cache keeps what its compiler makes, but an entry is found by the lowered program, and to
lower a step with Mosaic kernels takes seconds of Python; a server has dozens of steps. Here an
entry is found by what the program is made from: the code that would be traced, as it is loaded
(`serving.execution.traced_code`), the files beside it, versions, device, shapes and options.

Loading an entry runs what is in it: the folder deserves the trust that the code itself gets.
"""

import hashlib
import json
import logging
import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import jmoe
import pallas_kernels
from pallas_kernels.native import LIBRARY

KEPT_S = 30 * 24 * 3600
"""An entry that nothing has read for so long is removed."""

_CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_disable_most_optimizations",
)
_ENVIRONMENT = ("XLA_FLAGS", "NPROC")

log = logging.getLogger(__name__)


class Executables:
    """A folder of compiled programs; None: nothing is kept."""

    def __init__(self, folder: Path | None, devices: Sequence[Any] | None = None) -> None:
        """`devices` are those that the programs run on; None: the first."""
        self._folder = None
        self._devices = jax.devices()[:1] if devices is None else devices
        if folder is None:
            return
        try:
            own = folder.expanduser()
            own.mkdir(parents=True, exist_ok=True)
            _remove_old(own)
            self._folder = own
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            log.warning("%s cannot be used (%s); no compiled program is kept", folder, error)

    @classmethod
    def at(cls, directory: str, devices: Sequence[Any] | None = None) -> "Executables":
        """Opens a directory of the settings; an empty name turns it off."""
        return cls(Path(directory) / "steps" if directory else None, devices)

    def load(self, name: str, cache_key: object) -> jax.stages.Compiled | None:
        """Returns the program stored under a name and made from the same code; None where there is
        none.

        An entry that cannot be read is removed.
        """
        if self._folder is None or not (path := self._path(name, cache_key)).exists():
            return None
        try:
            compiled = deserialize_and_load(
                *pickle.loads(path.read_bytes()), execution_devices=self._devices
            )
        except Exception as error:  # whatever another version or a torn file may raise
            log.warning("%s cannot be read (%s) and is removed; it is compiled anew", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        _note_use(path)
        return compiled

    def save(self, name: str, cache_key: object, compiled: jax.stages.Compiled) -> None:
        """Stores a program; where that fails, logs it and goes on.

        Nothing is kept where XLA's own cache is on: on a CPU a program that came out of it is
        incomplete when it is serialized again.
        """
        if self._folder is None or jax.config.jax_compilation_cache_dir:
            return
        _write(self._path(name, cache_key), lambda: pickle.dumps(serialize(compiled)))

    def recall(self, name: str, cache_key: object) -> int | None:
        """Returns the number that was stored with a program; None where none was."""
        if self._folder is None:
            return None
        path = self._path(name, cache_key).with_suffix(".bytes")
        try:
            number = int(path.read_text("ascii"))
        except (OSError, ValueError):
            return None
        _note_use(path)
        return number

    def remember(self, name: str, cache_key: object, number: int) -> None:
        """Stores a number with a program, as `save` stores the program."""
        if self._folder is not None:
            _write(self._path(name, cache_key).with_suffix(".bytes"), str(number).encode)

    def _path(self, name: str, cache_key: object) -> Path:
        assert self._folder is not None
        digest = hashlib.sha256(f"{_surroundings()}\n{cache_key}".encode()).hexdigest()
        return self._folder / f"{name}-{digest[:32]}.bin"


def _write(path: Path, make: Callable[[], bytes]) -> None:
    """Writes what is made, at once or not at all."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_bytes(make())
        part.rename(path)
    except Exception as error:  # a full disk, a backend that cannot
        log.warning("%s cannot be kept (%s); the next start compiles it again", path, error)
        with suppress(OSError):
            part.unlink()


def _note_use(path: Path) -> None:
    """Keeps an entry from being removed with the old ones."""
    with suppress(OSError):  # another user's, perhaps
        os.utime(path)


def _remove_old(folder: Path) -> None:
    for path in (*folder.glob("*.bin"), *folder.glob("*.bytes"), *folder.glob("*.part")):
        with suppress(OSError):  # another server was quicker, or it is another user's
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()


def _surroundings() -> str:
    """Returns what every program depends on: versions, process, device, switches and sources."""
    device = jax.devices()[0]
    return json.dumps(
        {
            "jax": (jax.__version__, version("jaxlib"), device.client.platform_version),
            "process": (jax.process_index(), jax.process_count()),
            "device": (device.device_kind, _processor() if device.platform == "cpu" else ""),
            "config": [str(jax.config.values[name]) for name in _CONFIG],
            "environment": [os.environ.get(name, "") for name in _ENVIRONMENT],
            # Asked for, it is there for what is loaded, too.
            "native": device.platform == "cpu" and LIBRARY.is_there,
            "sources": sources(),
        }
    )


@cache
def sources(*others: Path) -> str:
    """Returns a digest of the files of the model and its kernels, some of which tracing alone
    imports, and of other folders.
    """
    digest = hashlib.sha256()
    for top in (*(Path(package.__path__[0]) for package in (jmoe, pallas_kernels)), *others):
        for path in sorted(top.rglob("*")):
            if path.suffix in (".py", ".cc", ".json"):
                digest.update(path.relative_to(top).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _processor() -> str:
    """Returns the CPU's features; a program compiled for another CPU may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
