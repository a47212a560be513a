"""Experts known by a low-rank difference from one that another model owns (Multi-MoE families).

Fine-tuned experts differ from one another by little: a sibling's expert plus a difference of rank
8 computes nearly what a model's own does, for a tenth of its memory (docs/consolidation.md). The
differences stay on the device; an expert is made of one in a spare slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jmoe.checkpoint import CheckpointError, checked_tensor, reading
from jmoe.config import ModelConfig
from jmoe.experts import Pool
from jmoe.offloaded import Expert
from jmoe.sharing import WEIGHTS_FILE, Sharing


class Residuals(NamedTuple):
    """Factors of n experts' differences from the slots that serve them otherwise."""

    gate_up_left: Float[Array, "n d r"]
    gate_up_right: Float[Array, "n r f2"]
    down_left: Float[Array, "n f r"]
    down_right: Float[Array, "n r d"]


@partial(jax.jit, donate_argnums=0)
def add_residual(
    pool: Pool,
    residuals: Residuals,
    at: Int[Array, ""],
    base: Int[Array, ""],
    slot: Int[Array, ""],
) -> Pool:
    """Writes slot `base` plus the difference number `at` into `slot`. The pool passed in is gone
    afterwards (donated). Sums are float32, rounded to the pool's dtype once.
    """

    def whole(leaf: Array, left: Array, right: Array) -> Array:
        precision = jax.lax.Precision.HIGHEST
        difference = jnp.matmul(
            left[at], right[at], precision=precision, preferred_element_type=jnp.float32
        )
        return leaf.astype(jnp.float32) + difference[None]

    up_left, up_right, down_left, down_right = residuals
    held = pool.read(base[None]).plain()
    gate_up, down = whole(held.gate_up, up_left, up_right), whole(held.down, down_left, down_right)
    own = held._replace(gate_up=gate_up, down=down)
    return pool.with_experts(slot[None], own)


@dataclass(frozen=True, eq=False)
class ByDifference:
    """A source of offloaded experts (`jmoe.offloaded.Source`): sums of a slot and a difference."""

    residuals: Residuals
    number: Mapping[Expert, int]
    base: Mapping[Expert, int]  # the slot that each differs from

    @property
    def fetch_bytes(self) -> int:
        """Bytes of one difference."""
        return self.device_bytes // max(1, len(self.number))

    @property
    def device_bytes(self) -> int:
        """Bytes of all differences."""
        return sum(leaf.nbytes for leaf in self.residuals)

    def write(self, pool: Pool, expert: Expert, slot: int) -> Pool:
        """See `jmoe.offloaded.Source`."""
        where = map(jnp.int32, (self.number[expert], self.base[expert], slot))
        return add_residual(pool, self.residuals, *where)


def tensor_name(fingerprint: str, layer: int, expert: int, key: str, side: str) -> str:
    """Returns the name of a factor in WEIGHTS_FILE; `key` is a field of ExpertPool, `side` left or
    right. Models are told apart by what their directories hold, so that their names and order may
    change.
    """
    model = fingerprint.removeprefix("sha256:")[:16]
    return f"residuals.{model}.layers.{layer}.experts.{expert}.{key}.{side}"


def read_residuals(
    sharing: Sharing, experts: Sequence[Expert], cfg: ModelConfig, check_weights: bool
) -> Residuals:
    """Reads the differences of `experts` (`Sharing.differs`), in bfloat16. Raises
    CheckpointError.
    """
    if sharing.directory is None:
        raise CheckpointError("the map has differences, and no directory that holds them")
    path, rank = sharing.directory / WEIGHTS_FILE, sharing.residual_rank
    d, f = cfg.d_model, cfg.d_ff_expert
    shapes = {
        ("gate_up", "left"): (d, rank),
        ("gate_up", "right"): (rank, cfg.up_matrices * f),
        ("down", "left"): (f, rank),
        ("down", "right"): (rank, d),
    }
    leaves = [np.empty((len(experts), *shape), jnp.bfloat16) for shape in shapes.values()]
    with reading(path) as file:
        for at, (model, layer, expert) in enumerate(experts):
            for leaf, ((key, side), shape) in zip(leaves, shapes.items(), strict=True):
                name = tensor_name(sharing.fingerprints[model], layer, expert, key, side)
                leaf[at] = checked_tensor(file, path, name, shape, leaf.dtype, check_weights)
    return Residuals(*map(jnp.asarray, leaves))
