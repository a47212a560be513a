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


def instead(directory: Path) -> str:
    """Says what there is in a directory in place of a model that jmoe loads, and what to do; ""
    where that is nothing known. It goes on a sentence.
    """
    if directory.suffix == ".gguf" or any(directory.glob("*.gguf")):
        return ". jmoe reads no GGUF: name the safetensors that it was made from"
    if (directory / "adapter_config.json").exists():
        return (
            ". This is an adapter: merge it into its base (merge_and_unload of peft), and save that"
        )
    if (directory / "snapshots").is_dir():
        return f". This is the Hub's cache: name {directory}/snapshots/REVISION, or OWNER/NAME"
    if not any(directory.glob("*.safetensors")) and any(directory.glob("pytorch_model*.bin")):
        source, target = str(directory), f"{directory.absolute().name}-safetensors"
        return (
            ". Convert a checkpoint of pytorch_model.bin files: pip install torch transformers && "
            'python -c "from transformers import AutoModelForCausalLM, AutoTokenizer; '
            f"AutoModelForCausalLM.from_pretrained({source!r}, torch_dtype='auto')"
            f".save_pretrained({target!r}); "
            f'AutoTokenizer.from_pretrained({source!r}).save_pretrained({target!r})"'
        )
    return ""


def lfs_pointer(path: Path) -> str:
    """Says that a file is a pointer of git-lfs, and what to do; "" of others. It goes on a
    sentence.
    """
    try:
        with regular(path).open("rb") as file:
            is_pointer = file.read(24).startswith(b"version https://git-lfs")
    except OSError:
        return ""
    return " (it is a pointer of git-lfs: `git lfs pull` gets the file)" * is_pointer
