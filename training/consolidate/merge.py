"""Merged experts, the mean of models' experts at a position; and the file beside `family.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jmoe.experts import ExpertPool
from jmoe.sharing import WEIGHTS_FILE

Tensors = dict[str, np.ndarray]
"""By the names that WEIGHTS_FILE has for them."""


def merged_name(layer: int, expert: int, key: str) -> str:
    """Returns the name of a merged expert's tensor in WEIGHTS_FILE; `key` is a field of
    ExpertPool.
    """
    return f"layers.{layer}.experts.{expert}.{key}"


def mean_experts(layer: int, pools: Sequence[ExpertPool], experts: Sequence[int]) -> Tensors:
    """Returns the mean of the models' weights, taken in float32, of some experts of MoE layer
    `layer`; in bfloat16.
    """
    found: Tensors = {}
    for key in pools[0].arrays:
        leaves = [np.asarray(getattr(pool, key)) for pool in pools]
        for expert in experts:
            mean = np.mean([leaf[expert].astype(np.float32) for leaf in leaves], axis=0)
            found[merged_name(layer, expert, key)] = mean.astype(jnp.bfloat16)
    return found


def write_weights(directory: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes WEIGHTS_FILE. Raises OSError."""
    path = directory / WEIGHTS_FILE
    save_file(dict(tensors), path)
    path.chmod(0o644)  # written as private by the library
