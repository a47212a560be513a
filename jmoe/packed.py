"""Weights that come with jmoe, in less space, unpacked into a cache at first use.

A file `NAME.safetensors` is kept as `NAME.npz` of its even and its odd bytes. Of bfloat16 those are
mantissas, which are noise, and exponents, which compress to less than 40 %; nothing is lost.
"""

import atexit
import shutil
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np

CACHE = Path("~/.cache/jmoe/models")


def pack(directory: Path) -> None:
    """Replaces every `.safetensors` file in a directory by its packed form."""
    for file in sorted(directory.glob("*.safetensors")):
        body = np.frombuffer(file.read_bytes(), np.uint8)
        np.savez_compressed(file.with_suffix(".npz"), even=body[0::2], odd=body[1::2])
        file.unlink()


@cache
def unpacked(directory: Path, into: Path = CACHE) -> Path:
    """Returns a directory of the same name that has every file of `directory`, unpacked.

    It lies below `into`, in a folder named by what it holds, and is written once. Where nothing can
    be written there, it is a temporary one that goes with the process.
    """
    folder = f"{_digest(directory):08x}"
    try:
        home = into.expanduser()
        found = home / folder / directory.name
        if found.is_dir():
            return found
        home.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=home))
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        made = Path(tempfile.mkdtemp(prefix="jmoe-"))
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return _unpack_all(directory, made / directory.name)
    _unpack_all(directory, made / directory.name)
    made.chmod(0o755)  # made for its owner alone
    try:
        made.rename(home / folder)
    except OSError:  # another process was first
        shutil.rmtree(made)
    return found


def _unpack_all(directory: Path, to: Path) -> Path:
    to.mkdir()
    for file in directory.iterdir():
        if file.suffix == ".npz":
            _unpack(file, to / f"{file.stem}.safetensors")
        elif file.is_file():
            shutil.copyfile(file, to / file.name)
    return to


def _unpack(file: Path, to: Path) -> None:
    with np.load(file) as parts:
        even, odd = parts["even"], parts["odd"]
    body = np.empty(even.size + odd.size, np.uint8)
    body[0::2], body[1::2] = even, odd
    to.write_bytes(body.tobytes())


def _digest(directory: Path) -> int:
    """Returns a number that changes with any file; of packed ones their own checksums are read."""
    digest = 0
    for file in sorted(directory.iterdir()):
        if not file.is_file():
            continue
        sums = file.read_bytes()
        if file.suffix == ".npz":
            with zipfile.ZipFile(file) as packed:
                sums = repr([(part.CRC, part.file_size) for part in packed.infolist()]).encode()
        digest = crc32(file.name.encode() + b"\0" + sums, digest)
    return digest
