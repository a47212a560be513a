"""What lies beside `family.json`: merged experts, the mean of models' experts at a position, and
low-rank differences of models' experts from those that they share.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jmoe.experts import ExpertPool
from jmoe.residuals import tensor_name
from jmoe.sharing import MERGED, merged_name

Tensors = dict[str, np.ndarray]
"""By the names that `jmoe.sharing.WEIGHTS_FILE` has for them."""

LARGEST_EXACT = 512
"""Of a matrix's smaller side: beyond, its singular vectors are sought in a random subspace."""
OVERSAMPLED, ITERATIONS = 16, 4
"""More vectors than are wanted, and how often the matrix is applied to them."""


def low_rank(
    matrices: Float[np.ndarray, "... n k"], rank: int
) -> tuple[Float[np.ndarray, "... n r"], Float[np.ndarray, "... r k"]]:
    """Returns factors of the nearest matrices of rank `rank` (Frobenius); singular values are split
    evenly.

    Of large matrices they are nearly the nearest: subspace iteration from random vectors (Halko,
    Martinsson and Tropp, "Finding structure with randomness", Algorithm 4.4).
    """
    matrices = matrices.astype(np.float32)
    basis = None
    if min(matrices.shape[-2:]) > LARGEST_EXACT:
        basis = _subspace(matrices, rank + OVERSAMPLED)
    inside = matrices if basis is None else np.swapaxes(basis, -1, -2) @ matrices
    left, size, right = np.linalg.svd(inside, full_matrices=False)
    left = left if basis is None else basis @ left
    root = np.sqrt(size[..., :rank])
    return left[..., :rank] * root[..., None, :], root[..., None] * right[..., :rank, :]


def _subspace(
    matrices: Float[np.ndarray, "... n k"], size: int
) -> Float[np.ndarray, "... n {size}"]:
    """Returns an orthonormal basis of nearly all that the largest singular vectors span."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(matrices @ rng.standard_normal((matrices.shape[-1], size), np.float32))[0]
    for _ in range(ITERATIONS):
        other = np.linalg.qr(np.swapaxes(matrices, -1, -2) @ basis)[0]
        basis = np.linalg.qr(matrices @ other)[0]
    return basis


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


def layer_residuals(
    layer: int,
    pools: Sequence[ExpertPool],
    owners: Int[np.ndarray, "N m"],
    merged: Tensors,
    fingerprints: Sequence[str],
    rank: int,
) -> Tensors:
    """Returns bfloat16 factors of how the models' experts in MoE layer `layer` differ from those
    that serve them. `merged` has the tensors of merged experts.
    """
    found: Tensors = {}
    for key in pools[0].arrays:
        leaves = [np.asarray(getattr(pool, key)) for pool in pools]
        for model, expert in np.argwhere(owners != np.arange(len(pools))[:, None]).tolist():
            owner, own = owners[model, expert], leaves[model][expert]
            shared = merged[merged_name(layer, expert, key)] if owner == MERGED else None
            shared = leaves[owner][expert] if shared is None else shared
            factors = low_rank(own.astype(np.float32) - shared.astype(np.float32), rank)
            for side, factor in zip(("left", "right"), factors, strict=True):
                name = tensor_name(fingerprints[model], layer, expert, key, side)
                found[name] = np.ascontiguousarray(factor).astype(jnp.bfloat16)
    return found
