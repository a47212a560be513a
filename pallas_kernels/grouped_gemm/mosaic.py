"""Mosaic GPU kernels of the grouped GEMM, for Hopper (sm_90a).

Two calls of one kernel (`kernel.py`): `gate_up` with SwiGLU in its epilogue, then `down`. Rows are
gathered before the first and combined after the second by XLA: Hopper's TMA gathers nothing.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.activation import SILU, Activation, ClampedSwiglu, Relu2, Silu
from pallas_kernels.backend import num_sms
from pallas_kernels.grouped_gemm.four_bits import HALF, PackedWeights
from pallas_kernels.grouped_gemm.kernel import CHUNK, Gemm
from pallas_kernels.grouped_gemm.op import Biases, tile_for
from pallas_kernels.grouped_gemm.quantized import BLOCK, Weights, weight_bits, weight_sizes
from pallas_kernels.grouped_gemm.tiles import LANES, Tile
from pallas_kernels.routing import RowTiles, map_tiles
from pallas_kernels.routing.op import Dispatch


def supports(
    x: Array, gate_up: Weights, down: Weights, plan: Dispatch, activation: Activation = SILU
) -> bool:
    """Returns whether the kernels take these shapes and dtypes, and the activation (`JOINS`,
    `APPLIED`).

    Rows are bfloat16; d and f multiples of 64 in a pool of bfloat16 or four bits, of 128 in one of
    eight. Four bits also want both to be 128 at least, and groups of 32 or of a multiple of 64; a
    first product without a gate wants f to be what the widest tile makes of it.
    """
    f, d = weight_sizes(down)
    block_m = plan.row_token.shape[0] // plan.block_slot.shape[0]
    bits, weights = weight_bits(down), (gate_up, down)
    unit = BLOCK if bits == 8 else LANES
    bf16 = x.dtype == jnp.bfloat16 and all(
        w.dtype == jnp.bfloat16 for w in weights if isinstance(w, jax.Array)
    )
    grouped = all(_takes_groups(w) for w in weights if isinstance(w, PackedWeights))
    return (
        type(activation) in JOINS.keys() | APPLIED.keys()
        and bf16
        and weight_bits(gate_up) == bits
        and grouped
        and d % unit == 0
        and f % unit == 0
        and (bits > 4 or min(d, f) >= 2 * LANES)
        and (type(activation) in JOINS or f >= 4 * LANES)
        and block_m % CHUNK == 0
    )


def _takes_groups(weights: PackedWeights) -> bool:
    """Returns whether no stage begins within a group and ends behind it."""
    group = weights.group
    return group == HALF or group % (2 * HALF) == 0 or group >= weights.k


def moe_mlp(
    x: Float[Array, "T d"],
    gate_up: Weights,
    down: Weights,
    plan: Dispatch,
    activation: Activation = SILU,
    biases: Biases | None = None,
    *,
    tile: Tile | None = None,
    num_blocks: int | None = None,
) -> Float[Array, "T d"]:
    """See `op.moe_mlp`; `supports` says for what. A kernel has `num_blocks` persistent blocks, by
    default one a multiprocessor.
    """
    num_blocks = num_blocks or num_sms()
    num_rows, top_k = plan.visit_row.shape
    tile = tile or tile_for(num_rows, top_k, plan.expert_rows.shape[0], down)
    work = map_tiles(plan, RowTiles(tile.block_t, tile.group))
    # A tile may start in the last rows: the rows it has past the end are there to be read. They and
    # gap rows hold a copy of the last token: what comes of it goes nowhere.
    row_token = jnp.pad(plan.row_token, (0, tile.block_t), constant_values=x.shape[0])
    rows = jnp.take(x, row_token, axis=0, mode="clip")
    second = Gemm(tile, tile.down, None, num_blocks)
    kind, join = type(activation), None
    if kind in JOINS:
        join = partial(JOINS[kind], activation)
    first = Gemm(tile, tile.gate_up, join, num_blocks, APPLIED.get(kind))
    of_gate_up, of_down = biases or (None, None)
    h = first(rows, gate_up, work, x.dtype, of_gate_up, then=(second, down))
    y = second(h, down, work, tile.visit_dtype, of_down)
    return combine(y, plan)


def combine(y: Float[Array, "rows d"], plan: Dispatch) -> Float[Array, "T d"]:
    """Returns the weighted sum of a row's visits, in order, in float32."""
    num_rows, top_k = plan.visit_row.shape
    computed = plan.visit_row < plan.row_token.shape[0]
    out = jnp.zeros((num_rows, y.shape[1]), jnp.float32)
    for k in range(top_k):  # not an einsum: gathered visits would be written first
        visit = jnp.take(y, plan.visit_row[:, k], axis=0, mode="clip").astype(jnp.float32)
        # Rows of no expert hold anything: a dropped visit must not even multiply one by 0.
        out += jnp.where(computed[:, k, None], plan.visit_weight[:, k, None] * visit, 0.0)
    return out


def swiglu(
    activation: Silu, gate: Float[Array, "m n"], up: Float[Array, "m n"]
) -> Float[Array, "m n"]:
    """Computes `silu(gate) * up`. The square of rsqrt is a reciprocal at a fraction of a division's
    cost.
    """
    root = lax.rsqrt(1.0 + jnp.exp(-gate))
    return gate * (root * root) * up


def clamped_swiglu(
    activation: ClampedSwiglu, gate: Float[Array, "m n"], up: Float[Array, "m n"]
) -> Float[Array, "m n"]:
    """Computes the activation as `swiglu` does."""
    gate = jnp.minimum(gate, activation.limit)
    up = jnp.maximum(jnp.minimum(up, activation.limit), -activation.limit)
    root = lax.rsqrt(1.0 + jnp.exp(-activation.alpha * gate))
    return gate * (root * root) * (up + 1.0)


JOINS: dict[type, Callable] = {Silu: swiglu, ClampedSwiglu: clamped_swiglu}
"""How the first product's epilogue joins gate and up, by the activation's type."""


def relu2(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Computes `relu(x)^2`."""
    x = jnp.maximum(x, 0.0)
    return x * x


APPLIED: dict[type, Callable] = {Relu2: relu2}
"""What it makes of a first product without a gate."""
