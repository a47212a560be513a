"""Merged experts: the mean of the models' experts at a position, beside `family.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jmoe.experts import ExpertPool
from jmoe.sharing import MERGED_FILE

Merged = dict[str, np.ndarray]
"""Tensors by the names that MERGED_FILE has for them."""


def mean_experts(layer: int, pools: Sequence[ExpertPool], experts: Sequence[int]) -> Merged:
    """The mean of the models' weights, taken in float32, of some experts of MoE layer `layer`; in
    bfloat16.
    """
    found: Merged = {}
    for key in ExpertPool._fields:
        leaves = [np.asarray(getattr(pool, key)) for pool in pools]
        for expert in experts:
            mean = np.mean([leaf[expert].astype(np.float32) for leaf in leaves], axis=0)
            found[f"layers.{layer}.experts.{expert}.{key}"] = mean.astype(jnp.bfloat16)
    return found


def write_merged(directory: Path, merged: Mapping[str, np.ndarray]) -> None:
    """Writes MERGED_FILE. Raises OSError."""
    path = directory / MERGED_FILE
    save_file(dict(merged), path)
    path.chmod(0o644)  # written as private by the library
