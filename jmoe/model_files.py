"""Files of a model's directory: regular ones, under names that stay in it.

They may be symbolic links: the Hub's cache keeps its files elsewhere.
"""

import errno
import os
import stat
from pathlib import Path, PurePosixPath


def regular(path: Path) -> Path:
    """Returns the path, of a regular file or a link to one.

    Raises OSError for all else: to open a FIFO may wait for ever, and a device may have no end.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path


def read_text(path: Path) -> str:
    """Returns a regular file's text. Raises OSError, and ValueError for what is not UTF-8."""
    return regular(path).read_text(encoding="utf-8")


def stays_inside(name: str) -> bool:
    """Returns whether a name in an index can be that of a file in the index's folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and name.isprintable() and not path.is_absolute() | (".." in path.parts)
