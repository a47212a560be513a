"""Fine-tuned variants of a checkpoint, as a test needs them: its weights and a little noise."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def variant(directory, to, seed, *, scale=0.05, only=""):
    """Copies a directory with noise on tensors whose names contain `only`."""
    path = Path(shutil.copytree(directory, to))
    rng = np.random.default_rng(seed)

    def changed(name, tensor):
        if only not in name:
            return tensor
        spread = scale * max(float(np.std(tensor.astype(np.float32))), 1e-3)
        return tensor + (spread * rng.standard_normal(tensor.shape)).astype(tensor.dtype)

    change(path, changed)
    return path


def change(directory, changed):
    """Writes a directory's tensors anew, as `changed(name, tensor)` returns them."""
    for file in sorted(Path(directory).glob("model*.safetensors")):
        save_file({name: changed(name, t) for name, t in load_file(file).items()}, file)


def tensors(directory):
    """Returns all tensors of a directory, by name."""
    found = {}
    for file in sorted(Path(directory).glob("model*.safetensors")):
        found.update(load_file(file))
    return found
