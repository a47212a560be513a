"""The second kernel of paged attention: pieces of results become results."""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.common import NONE, NUM_SMS, PARAMS, TINY, Sizes, splat


def merge(sizes: Sizes, dtype):
    """Kernel: joins the pieces [slots, lines, line] of every segment; [segments, lines, line]."""
    line, num_lines = sizes.line, sizes.rows * sizes.head_dim // sizes.line
    # Few segments have many pieces each: a block for each of their lines, and more at a time.
    lines = 1 if sizes.segments * num_lines <= 8 * NUM_SMS else math.gcd(num_lines, 8)
    width = max(2, sizes.tile.merge_width // lines)

    def merge_pieces(before, pieces, log_sums, out):
        segment = lax.axis_index("segment")
        first_line = lax.axis_index("lines") * lines
        first, count = _pieces_of(sizes, sizes.tiles_before(before), segment)

        def one_step(i, states):
            # All loads before the first use. Past the end the last piece has no weight.
            slots = [first + lax.min(i * width + u, count - 1) for u in range(width)]
            live = [i * width + u < count for u in range(width)]
            loaded = [[pieces[slot, first_line + at] for slot in slots] for at in range(lines)]
            sums = [
                [
                    _log_sum(sizes, log_sums, *of, first_line + at)
                    for of in zip(slots, live, strict=True)
                ]
                for at in range(lines)
            ]
            return tuple(map(_join, states, sums, loaded))

        layout = plgpu.Layout.WG_STRIDED((line,), line // 128)
        start = tuple(splat(x, (line,), layout) for x in (NONE, 0.0, 0.0))
        steps = lax.div(count + width - 1, width)
        states = lax.fori_loop(0, steps, one_step, (start,) * lines)
        for at, (_, norm, acc) in enumerate(states):
            out[segment, first_line + at] = (acc / jnp.maximum(norm, TINY)).astype(dtype)

    return plgpu.kernel(
        merge_pieces,
        out_type=jax.ShapeDtypeStruct((sizes.segments, num_lines, line), dtype),
        grid=(num_lines // lines, sizes.segments),  # the last may be large
        grid_names=("lines", "segment"),
        # Nothing is read that is written, and no thread needs what another has: no barriers.
        compiler_params=dataclasses.replace(PARAMS, unsafe_no_auto_barriers=True),
        kernel_name="paged_attention_merge",
    )


def _pieces_of(sizes: Sizes, before, segment):
    """First slot and number of the segment's pieces."""
    row = lax.div(segment, sizes.kv_heads)
    tiles = before(row + 1) - before(row)
    start = before(row) * sizes.kv_heads + lax.rem(segment, sizes.kv_heads) * tiles
    share = sizes.share(before)
    first, last = share.owner(start), share.owner(start + tiles - 1)
    return segment + first, jnp.where(tiles > 0, last + 1 - first, 0)


def _log_sum(sizes: Sizes, log_sums, slot, live, at):
    """Log-sum-exps of the rows in line `at` of a piece, at all of their elements."""
    rows = sizes.line // sizes.head_dim
    shape = (sizes.line,)
    of_rows = [
        jnp.full(shape, jnp.where(live, log_sums[slot, at * rows + r], NONE)) for r in range(rows)
    ]
    if rows == 1:
        return of_rows[0]
    return jnp.where(lax.broadcasted_iota(jnp.int32, shape, 0) < sizes.head_dim, *of_rows)


def _join(state, sums, loaded):
    """Takes more pieces of a line into its state: maximum, sum of weights, weighted sum."""
    top, norm, acc = state
    new_top = functools.reduce(jnp.maximum, sums, top)
    keep = jnp.exp2(top - new_top)
    norm, acc = norm * keep, acc * keep
    for log_sum, values in zip(sums, loaded, strict=True):
        weight = jnp.exp2(log_sum - new_top)
        norm, acc = norm + weight, acc + weight * values
    return new_top, norm, acc
