"""Whether an op computed what it should: float32 references, poisoned memory, and bit equality.

The references here are written for clearness and share no code with the ops. Products are float32
throughout ("highest": XLA would otherwise round operands to tf32).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import grouped_gemm
from pallas_kernels import routing as ops
from pallas_kernels.backend import references_only
from pallas_kernels.grouped_gemm import PackedWeights

ROWS = 256  # query rows of the attention reference at a time

# Searching for the fastest algorithm would take longer than the reference runs.
_slow = functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})


def relative_error(out: jax.Array, want: jax.Array) -> float:
    """Returns the Frobenius norm of the difference over that of `want`; NaN if there is one in
    `out`.
    """
    return float(_relative_error(out, want))


@_slow
def _relative_error(out, want):
    gap = out.astype(jnp.float32) - want
    return jnp.sqrt(jnp.sum(gap * gap) / jnp.sum(want * want))


@_slow
def all_experts(x, gate_up, down, gates):
    """Returns `sum_e gates[t, e] * mlp_e(x[t])` in float32: every expert on every row, most with
    weight 0.
    """
    x = x.astype(jnp.float32)

    def one_expert(total, expert):
        up_weights, down_weights, weight = expert
        with jax.default_matmul_precision("highest"):
            gate, up = jnp.split(x @ up_weights.astype(jnp.float32), 2, axis=1)
            out = (jax.nn.silu(gate) * up) @ down_weights.astype(jnp.float32)
        return total + weight[:, None] * out, None

    return lax.scan(one_expert, jnp.zeros_like(x), (gate_up, down, gates.T))[0]


def widened(weights: Any, count: int) -> jax.Array:
    """Returns the first `count` experts of quantized weights in float32, [count, k, columns]."""
    if isinstance(weights, PackedWeights):
        values, scales, zeros = (leaf[:count] for leaf in jax.tree.leaves(weights))
        pairs = values.reshape(*values.shape[:-1], -1, 32)
        codes = jnp.stack([pairs % 16, pairs // 16], axis=-2).reshape(*values.shape[:-1], -1)
        wide = (jnp.repeat(x.astype(jnp.float32), weights.group, axis=1) for x in (zeros, scales))
        zero, scale = (x[:, : weights.k] for x in wide)
        return (codes.swapaxes(1, 2)[:, : weights.k].astype(jnp.float32) - zero) * scale
    values, scales = (leaf[:count].astype(jnp.float32) for leaf in weights)
    block = values.shape[1] // scales.shape[1]
    return (values * jnp.repeat(jnp.repeat(scales, block, axis=1), block, axis=2)).swapaxes(1, 2)


@functools.partial(_slow, static_argnames="window")
def attended(q, k_pages, v_pages, table, window=0):
    """Returns causal attention of q [T, H, D] in float32, its sequences equally long, over one
    layer's pages.

    The rows of a sequence are the last of its context, which fills its pages. A row sees the last
    `window` positions, its own included; 0: all.
    """
    of_sequences = q.reshape(table.shape[0], -1, *q.shape[1:])

    def one_sequence(args):
        q, pages = args
        own = (cache[pages].astype(jnp.float32).swapaxes(1, 2) for cache in (k_pages, v_pages))
        return _causal(q, *(one.reshape(-1, *one.shape[2:]) for one in own), window)

    out = lax.map(one_sequence, (of_sequences, table))
    return out.reshape(*q.shape[:2], -1)


def _causal(q, k, v, window):
    """Attends with the last rows [T, H, D] of keys [C, G, D] and values [C, G, V] in float32."""
    (rows, heads, head_dim), (positions, kv_heads, _) = q.shape, k.shape
    tile = min(rows, ROWS)
    tiles = q.reshape(rows // tile, tile, kv_heads, heads // kv_heads, head_dim)

    def one_tile(args):
        tile_index, qt = args
        with jax.default_matmul_precision("highest"):
            scores = jnp.einsum("tgnd,cgd->gntc", qt.astype(jnp.float32), k) * head_dim**-0.5
            position = positions - rows + tile_index * tile + jnp.arange(tile)
            behind = position[:, None] - jnp.arange(positions)[None, :]
            seen = (behind >= 0) & (behind < (window or positions))
            p = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
            return jnp.einsum("gntc,cgd->tgnd", p, v)

    return lax.map(one_tile, (jnp.arange(rows // tile), tiles)).reshape(rows, heads, -1)


@_slow
def expanded(q, weights, pages, table):
    """Returns what `attended` does of keys and values that are made of one layer's latents, a head
    at a time.
    """
    heads, rank = q.shape[1], weights[0].shape[0]
    of_heads = [w.reshape(rank, heads, -1).swapaxes(0, 1).astype(jnp.float32) for w in weights]
    of_sequences = q.reshape(table.shape[0], -1, *q.shape[1:])

    def one_sequence(args):
        q, own = args
        latents = pages[own].astype(jnp.float32).reshape(-1, pages.shape[-1])

        def one_head(args):
            q, *made_by = args
            with jax.default_matmul_precision("highest"):
                key, value = (latents[:, :rank] @ own for own in made_by)
            key = jnp.concatenate([key, latents[:, rank:]], axis=1)
            return _causal(q[:, None], key[:, None], value[:, None], 0)[:, 0]

        return lax.map(one_head, (q.swapaxes(0, 1), *of_heads)).swapaxes(0, 1)

    out = lax.map(one_sequence, (of_sequences, table))
    return out.reshape(*q.shape[:2], -1)


def routing(args: tuple[Any, ...], top_k: int) -> Callable[[Any], float]:
    """Returns the judge of a layer's routing: the share of rows or entries that are wrong.

    Picks must have the largest logits. Plan and dispatch must equal, weights to rounding and all
    else exactly, what the XLA reference makes of these picks and of their softmax.
    """
    logits, slots, brownout = args

    @jax.jit
    def wanted(ids):
        weights = jax.nn.softmax(jnp.take_along_axis(logits, ids, axis=1), axis=1)  # normalised
        plan = ops.brownout_plan(ids, **brownout)
        block_m, m = grouped_gemm.BLOCK_M, brownout["groups"].shape[0]
        work = ops.dispatch(plan.expert_ids, weights, slots, block_m=block_m, max_active=m)
        return plan, work

    def error(out: Any) -> float:
        ids, plan, work = out
        best, _ = lax.top_k(logits, top_k)
        apart = jnp.abs(best - jnp.take_along_axis(logits, ids, axis=1))
        with references_only():
            want = wanted(ids)
        wrong = jax.tree.leaves(jax.tree.map(_wrong_share, (plan, work), want))
        return float(max(map(float, [jnp.mean(apart > 1e-5), *wrong])))

    return error


def _wrong_share(got, want):
    if jnp.issubdtype(want.dtype, jnp.floating):
        return jnp.mean(~(jnp.abs(got - want) <= 1e-5 * jnp.abs(want)))
    return jnp.mean(got != want)


def finished_heads(rows, kv_heads, cos, sin, norms, eps):
    """Returns queries, keys and values of biased rows [T, N, D] in float32, after norms and
    rotation.
    """
    heads = rows.shape[1] - 2 * kv_heads
    *turned, values = jnp.split(rows.astype(jnp.float32), [heads, heads + kv_heads], axis=1)
    if norms is not None:
        roots = [jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) for x in turned]
        weights = [norm.astype(jnp.float32)[None, None] for norm in norms]
        turned = [x / root * w for x, root, w in zip(turned, roots, weights, strict=True)]
    angle = lax.complex(cos, sin)[:, None]
    turned = [lax.complex(*jnp.split(x, 2, axis=-1)) * angle for x in turned]
    return *(jnp.concatenate([z.real, z.imag], axis=-1) for z in turned), values


def kv_write(before: Any, heads: tuple[Any, ...], places: Any) -> Callable[[Any], float]:
    """Returns the judge of a KV page write: the largest error of queries, keys and values, or 1
    where anything but the named rows of pages changed.

    `heads` are those of `finished_heads`.
    """
    layer, page, offset = places

    def error(after: Any) -> float:
        *caches, queries = after
        errors = [relative_error(queries, heads[0])]
        for old, now, rows in zip(before, caches, heads[1:], strict=True):
            errors.append(relative_error(now[layer, page, :, offset], rows))
            put_back = now.at[layer, page, :, offset].set(old[layer, page, :, offset])
            errors.append(0.0 if _same_bits(put_back, old) else 1.0)
        return max(errors)

    return error


class Check(NamedTuple):
    """What was seen of one op's results before it was timed."""

    error: float
    tolerance: float
    unwritten: int  # elements that still held the poison
    poisoned: bool | None  # whether the results lay in poisoned memory; None: made in place
    deterministic: bool  # a second run gave the same bits

    @property
    def passed(self) -> bool:
        """Whether results are right. NaN, which never passes, is not smaller than anything."""
        return self.error <= self.tolerance and not self.unwritten and self.deterministic


def poison(sizes_bytes: Sequence[int]) -> list[range]:
    """Fills free device memory with bits that are NaN in every float type; returns the addresses.

    Results of a jitted function cannot be poisoned in place, for they are allocated by the run. So
    blocks of the sizes the run will ask for are filled and freed, several of each, and the
    allocator, which gives out the tightest block that is free, hands them to the run. Whether it
    did can be told of results, by their address; of a program's temporary memory it can not.
    """
    blocks = []
    for size in sizes_bytes:
        words = max(1, size // 4)
        copies = 3 if size < 4 << 30 else 1
        blocks += [jnp.full(words, np.uint32(0xFFFFFFFF)) for _ in range(copies)]
    jax.block_until_ready(blocks)
    spans = [
        range(block.unsafe_buffer_pointer(), block.unsafe_buffer_pointer() + block.nbytes + 256)
        for block in blocks
    ]
    for block in blocks:
        block.delete()
    return spans


def check(program: Any, error: Callable[[Any], float], tolerance: float) -> Check:
    """Runs set 0 twice, into poisoned memory, and judges the results.

    A program with a carry updates memory in place; nothing is poisoned there, and `error` looks at
    all of the carry.
    """
    in_place = program.carry is not None
    spans = [] if in_place else poison(program.result_bytes)
    out = jax.block_until_ready(program(0))
    leaves = jax.tree.leaves(out)
    where = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    poisoned = None if in_place else all(any(at in span for span in spans) for at in where)
    unwritten = sum(int(jnp.sum(jnp.isnan(x))) for x in leaves if _is_float(x))
    first = jax.tree.map(jnp.copy, out) if in_place else out
    value = error(first)
    again = jax.block_until_ready(program(0))
    same = all(map(_same_bits, jax.tree.leaves(first), jax.tree.leaves(again)))
    return Check(value, tolerance, unwritten, poisoned, same)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _same_bits(a: jax.Array, b: jax.Array) -> bool:
    if _is_float(a):
        bits = np.dtype(f"uint{8 * a.dtype.itemsize}")
        a, b = lax.bitcast_convert_type(a, bits), lax.bitcast_convert_type(b, bits)
    return bool(jnp.all(a == b))
