"""A variant as its differences from the bundled model: of low rank for routed and united experts,
the rest whole.

The file has `{leaf}` for every other parameter in bfloat16, keyed as docs/architecture.md has them
(`embed`, `segments.0.wqkv`), and for each of an expert's two matrices `{key}.left [L, m, in, r]`
and `{key}.right [L, m, r, out]`, whose product is added to the bundled model's. Likewise
`united.{key}.left [L, U, in, r]` and `united.{key}.right [L, U, r, out]` of united experts.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jmoe.checkpoint import save_tensors
from training.consolidate.residuals import low_rank
from training.network import Params

RANK, UNITED_RANK = 8, 32

Experts = Mapping[str, np.ndarray | jax.Array]
"""`gate_up [L, n, d, 2f]` and `down [L, n, f, d]`."""


def write_differences(
    path: Path,
    base: Params,
    variant: Params,
    united: tuple[Experts, Experts],
    rank: int = RANK,
    united_rank: int = UNITED_RANK,
) -> None:
    """Writes a variant of `base`; `united` are the united experts of both. Raises OSError."""
    tensors = _factors("", base["experts"], variant["experts"], rank)
    tensors |= _factors("united.", *united, united_rank)
    tensors |= {name: np.asarray(leaf) for name, leaf in _others(variant).items()}
    save_tensors(path, {name: _low(tensor) for name, tensor in tensors.items()})


def read_differences(
    path: Path, base: Params, united: Experts
) -> tuple[Params, dict[str, jax.Array]]:
    """Reads a variant and its united experts, float32; `united` are those of `base`.

    Raises ValueError for a file that is none of a variant of `base`.
    """
    try:
        found = {name: t.astype(np.float32) for name, t in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not readable: {error}") from None
    try:
        experts = _added("", base["experts"], found)
        own_united = _added("united.", united, found)
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
    return {**named, "experts": experts}, own_united


def _factors(prefix: str, base: Experts, own: Experts, rank: int) -> dict[str, np.ndarray]:
    found = {}
    for key, leaf in own.items():
        change = np.asarray(leaf, np.float32) - np.asarray(base[key], np.float32)
        name = prefix + key
        found[f"{name}.left"], found[f"{name}.right"] = low_rank(change, rank)
    return found


def _added(prefix: str, base: Experts, found: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns `base` plus the stored differences. Raises KeyError, ValueError or TypeError for
    factors that are missing or do not fit.
    """
    changes = {key: found[f"{prefix}{key}.left"] @ found[f"{prefix}{key}.right"] for key in base}
    return {key: jnp.asarray(leaf) + jnp.asarray(changes[key]) for key, leaf in base.items()}


def _low(tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tensor).astype(jnp.bfloat16)


def _others(params: Params) -> Mapping[str, jax.Array]:
    leaves = jax.tree.leaves_with_path({k: v for k, v in params.items() if k != "experts"})
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
