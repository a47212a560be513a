"""A variant as what it differs by from the bundled model: experts by low rank, the rest whole.

The file has `{leaf}` for every other parameter in bfloat16, keyed as docs/architecture.md has them
(`embed`, `segments.0.wqkv`), and for each of an expert's two matrices `{key}.left [L, m, in, r]`
and `{key}.right [L, m, r, out]`, whose product is added to the bundled model's.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from training.consolidate.residuals import low_rank
from training.network import Params

RANK = 8


def write_differences(path: Path, base: Params, variant: Params, rank: int = RANK) -> None:
    """Writes a variant of `base`. Raises OSError."""
    tensors = {}
    for key, leaf in variant["experts"].items():
        change = np.asarray(leaf, np.float32) - np.asarray(base["experts"][key], np.float32)
        tensors[f"{key}.left"], tensors[f"{key}.right"] = low_rank(change, rank)
    tensors |= {name: np.asarray(leaf) for name, leaf in _others(variant).items()}
    save_file({name: _low(tensor) for name, tensor in tensors.items()}, path)
    path.chmod(0o644)  # written as private by the library


def read_differences(path: Path, base: Params) -> Params:
    """The variant, float32. Raises ValueError for a file that is none of a variant of `base`."""
    try:
        found = {name: t.astype(np.float32) for name, t in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not readable: {error}") from None
    try:
        experts = {
            key: leaf + jnp.asarray(found[f"{key}.left"] @ found[f"{key}.right"])
            for key, leaf in base["experts"].items()
        }
        shapes = {name: leaf.shape for name, leaf in _others(base).items()}
        if {name: found[name].shape for name in shapes} != shapes:
            raise ValueError("its tensors have other shapes")
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} holds no variant of this model ({error}); `python -m training.family` makes "
            "them anew"
        ) from None
    others = {key: leaf for key, leaf in base.items() if key != "experts"}
    named = jax.tree.map_with_path(lambda at, _: jnp.asarray(found[_name(at)]), others)
    return {**named, "experts": experts}


def _low(tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tensor).astype(jnp.bfloat16)


def _others(params: Params) -> Mapping[str, jax.Array]:
    leaves = jax.tree.leaves_with_path({k: v for k, v in params.items() if k != "experts"})
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple) -> str:
    return ".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)
