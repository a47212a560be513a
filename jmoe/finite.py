"""Whether weights are finite. NaN or infinity in one of them can spread to every logit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_finite(array: Any) -> bool:
    """Returns whether every element is finite, on the host: infinity and NaN have the highest
    exponent.
    """
    values = np.asarray(array)
    highest = np.array(np.inf, values.dtype).view(f"u{values.itemsize}")
    return values.size == 0 or bool((values.view(highest.dtype) & highest).max() != highest)


def seem_finite(tree: Any) -> bool:
    """Returns true where every floating-point array of the tree is finite. False: look at each of
    them.

    Arrays in host memory are looked at where they lie, without a program to compile. For others it
    is one program and one answer from the device; there sums that overflow make it say False of a
    tree that is finite.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    elsewhere = [leaf for leaf in leaves if not _on_host(leaf)]
    if not all(is_finite(leaf) for leaf in leaves if _on_host(leaf)):
        return False
    return not elsewhere or bool(sums_are_finite(elsewhere))


def _on_host(leaf: jax.Array | np.ndarray) -> bool:
    return isinstance(leaf, np.ndarray) or all(d.platform == "cpu" for d in leaf.devices())


@jax.jit
def sums_are_finite(leaves: list[jax.Array]) -> jax.Array:
    """Returns whether the sums over the first axes are finite: only where all of their terms
    are.
    """
    return jnp.stack([jnp.isfinite(leaf.astype(jnp.float32).sum(0)).all() for leaf in leaves]).all()


def fault(name: str, raw: Any, dtype: Any) -> str | None:
    """Returns what is wrong with a tensor that is converted to `dtype`, in words; None for a finite
    one.
    """
    with np.errstate(over="ignore"):
        converted = np.asarray(raw).astype(dtype, copy=False)
    if is_finite(converted):
        return None
    if is_finite(raw):
        return f"{name} is not finite as {jnp.dtype(dtype).name}"
    return f"{name} holds NaN or infinity"
