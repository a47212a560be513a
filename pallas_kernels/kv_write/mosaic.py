"""Mosaic GPU kernel of the KV page write, for Hopper (sm_90a): one launch.

XLA makes four kernels of it, six with QK norm, and the rows of a decode step give none of them much
to do. The floor of a decode step is latency: page and row from memory, some hundred instructions,
and the way back. In prefill it is moving every row once in and once out.

- A block is one warpgroup and has one row. Its 12 KB of shared memory (48 heads of 128) and 32
  registers a thread (40 with norms) let sixteen blocks live on a multiprocessor (twelve), so that
  about 190 KB are in flight.
- Rows come and go by TMA: one copy each for the query, key and value heads, and a page takes a
  row's heads, a page's length apart, as one box. TMA takes a coordinate for each dimension, so that
  no flat index is computed, however large the cache.
- A head is cut into pieces as wide as half of what turns. A thread has the same elements of every
  piece, so nothing is exchanged to rotate, and changes them where they lie. A head's norm is a sum
  over the lanes of a warp; that of all heads is taken first, over all warps.
- Values without a bias or a bound are never looked at: they go from one copy into the next.
- Rows whose page is the last, nobody's, write no page.
- For pages in eight bits a head's largest magnitude is a maximum over the lanes of a warp, as the
  norm's sum is; its numbers lie beside the row's in shared memory. Scales are too far apart in a
  page for TMA: threads store them one by one.

Lane semantics: the layout is named here, and rows of a page start anywhere.
"""

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8_pages import E4M3, AnyPages, Fp8Pages, scales_of
from pallas_kernels.kv_write.op import Projection

_SMEM = 200 * 1024  # bytes that a row's heads may take: less than a block may have
_CHUNK = 16  # heads that are in registers at a time
F32, BF16 = jnp.float32, jnp.bfloat16


def supports(projection: Projection, k_pages: Any, v_pages: Any) -> bool:
    """Returns whether the kernel takes these: bfloat16, pages perhaps in eight bits, heads of 64,
    128 or 256 of which a power of two turns, 32 elements at least, float32 angles. Norms of a head
    may be float32.
    """
    num_rows, _, head_dim = projection.rows.shape
    heads, kv_heads = projection.heads, projection.kv_heads
    norms = [v for v in (projection.q_norm, projection.k_norm) if v is not None]
    is_wide = {v.dtype for v in norms} == {jnp.dtype(F32)} and {v.size for v in norms} == {head_dim}
    bias = [] if projection.bias is None else [projection.bias]
    narrow = [projection.rows, *bias, *([] if is_wide else norms)]
    is_fp8 = isinstance(k_pages, Fp8Pages)
    narrow += [] if is_fp8 else [k_pages, v_pages]
    if any(a.dtype != BF16 for a in narrow) or projection.cos.dtype != F32:
        return False
    half = projection.cos.shape[1]
    if head_dim not in (64, 128, 256) or half not in (16, 32, 64, 128) or 2 * half > head_dim:
        return False
    if num_rows == 0 or max(heads, kv_heads) > 256:
        return False
    room = Layout(head_dim, half)
    for norm, count in ((projection.q_norm, heads), (projection.k_norm, kv_heads)):
        # What lies in a unit past the last head is no zero, which a sum over all heads would need.
        # That sum is over heads that have not turned.
        of_all = norm is not None and norm.size != head_dim
        if of_all and (count % room.unit or projection.turned_first):
            return False
    beside = 2 * (head_dim + 4) * room.padded(kv_heads) * is_fp8
    return 2 * head_dim * (room.padded(heads) + 2 * room.padded(kv_heads)) + beside <= _SMEM


def write_kv(
    projection: Projection,
    k_pages: AnyPages,
    v_pages: AnyPages,
    *,
    layer: Int[Array, ""],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> tuple[Float[Array, "T H D"], AnyPages, AnyPages]:
    """See `op.write_kv`; `supports` says for what."""
    is_fp8 = isinstance(k_pages, Fp8Pages)
    rows, heads, kv_heads = projection.rows, projection.heads, projection.kv_heads
    num_rows, _, head_dim = rows.shape
    room = Layout(head_dim, projection.cos.shape[1])
    operands = {
        "layer": layer.astype(jnp.int32).reshape(1),
        "page": page.astype(jnp.int32),
        "offset": offset.astype(jnp.int32),
        "rows": rows,
        "cos": projection.cos,
        "sin": projection.sin,
    }
    kept: dict[str, Any] = {"k_pages": k_pages, "v_pages": v_pages}
    if isinstance(k_pages, Fp8Pages) and isinstance(v_pages, Fp8Pages):
        kept = {"k_pages": k_pages.bits, "v_pages": v_pages.bits}
        kept |= {"k_scales": k_pages.scales, "v_scales": v_pages.scales}
    kept = {name: jax.new_ref(array) for name, array in kept.items()}
    operands |= kept
    if projection.bias is not None:
        ragged = heads % room.unit or kv_heads % room.unit  # then heads past the last are read
        operands["bias"] = jnp.pad(projection.bias, ((0, room.unit if ragged else 0), (0, 0)))
    if projection.q_norm is not None:
        for name in ("q_norm", "k_norm"):
            norm = getattr(projection, name)
            operands[name] = norm if norm.size == head_dim else norm.reshape(-1, head_dim)

    def body(*refs, **scratch):
        *given, queries = refs
        named = dict(zip(operands, given, strict=True))
        _Row(projection, room, lax.axis_index("row"), queries, **named, **scratch).run()

    own = room.padded(kv_heads)
    smem = [plgpu.SMEM((room.padded(n), head_dim), BF16) for n in (heads, kv_heads, kv_heads)]
    names = ["q_smem", "k_smem", "v_smem"]
    if is_fp8:
        smem += 2 * [plgpu.SMEM((own, head_dim), jnp.uint8)] + 2 * [plgpu.SMEM((own,), F32)]
        names += ["k_bits", "v_bits", "k_scales_smem", "v_scales_smem"]
    queries = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, heads, head_dim), BF16),
        grid=(num_rows,),
        grid_names=("row",),
        scratch_types={
            **dict(zip(names, smem, strict=True)),
            "full": plgpu.Barrier(num_arrivals=3),
        },
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # a thread alone reads and writes its elements
        ),
        kernel_name="kv_write",
    )(*operands.values())
    written = [jax.freeze(ref) for ref in kept.values()]
    k_pages, v_pages = map(Fp8Pages, written[:2], written[2:]) if is_fp8 else written
    return queries, k_pages, v_pages


class Layout:
    """How a piece of some heads, [heads, half], lies in a warpgroup's registers.

    A thread has two neighbouring elements, or four of 128; a warp's lanes one head, or more of
    less than 64.
    """

    def __init__(self, head_dim: int, half: int) -> None:
        self.head_dim, self.half = head_dim, half
        vector = max(2, half // 32)
        in_warp = 32 * vector // half
        self.unit = 4 * in_warp  # heads come in multiples of it
        of_warps = ((self.unit, half),) if in_warp == 1 else ((self.unit, half), (in_warp, half))
        self.of_heads = plgpu.Layout.TILED(
            plgpu.Tiling((*of_warps, (vector,))),
            warp_dims=(-3,) if in_warp == 1 else (-5,),
            lane_dims=(-2,) if in_warp == 1 else (-3, -2),
            vector_dim=-1,
        )

    def padded(self, heads: int) -> int:
        """Returns the heads rounded up to whole units."""
        return -(-heads // self.unit) * self.unit

    def spread(self, vector, heads: int, axis: int):
        """Returns a vector over heads (axis 0) or over elements (1) as an array [heads, half]."""
        spread = lax.broadcast_in_dim(vector, (heads, self.half), (axis,))
        return plgpu.layout_cast(spread, self.of_heads)

    def load(self, ref, first: int, heads: int) -> list:
        """Loads the pieces of some heads of `ref` [.., D], as float32."""
        at = pl.ds(first, heads)
        parts = [ref.at[at, piece] for piece in self.pieces]
        return [plgpu.load(p, layout=self.of_heads, optimized=False).astype(F32) for p in parts]

    def load_vector(self, ref):
        """Returns a vector [half] in device memory."""
        return plgpu.load(ref, layout=self.of_heads.reduce(0), optimized=False)

    @property
    def pieces(self) -> list:
        """Slices of a head: the first two turn, against each other."""
        return [pl.ds(start, self.half) for start in range(0, self.head_dim, self.half)]


class _Row(NamedTuple):
    """The work of one block: a row."""

    projection: Projection
    room: Layout
    index: Any
    queries: Any  # [T, H, D]
    layer: Any
    page: Any
    offset: Any
    rows: Any
    cos: Any
    sin: Any
    k_pages: Any
    v_pages: Any
    q_smem: Any  # [H, D], padded to the layout's units, as the next two
    k_smem: Any
    v_smem: Any
    full: Any
    bias: Any = None
    q_norm: Any = None
    k_norm: Any = None
    k_scales: Any = None  # of pages in eight bits, as are those that follow
    v_scales: Any = None
    k_bits: Any = None  # [G, D], padded
    v_bits: Any = None
    k_scales_smem: Any = None
    v_scales_smem: Any = None

    def run(self) -> None:
        heads, kv_heads = self.projection.heads, self.projection.kv_heads
        own = pl.ds(0, kv_heads)
        k_kept, v_kept, is_fp8 = self.k_smem, self.v_smem, self.k_bits is not None
        if is_fp8:
            k_kept, v_kept = self.k_bits, self.v_bits
        parts = [
            (self.q_smem, 0, heads, self.q_norm, self.q_smem, None),
            (self.k_smem, heads, kv_heads, self.k_norm, k_kept, self.k_scales_smem),
            (self.v_smem, heads + kv_heads, kv_heads, None, v_kept, self.v_scales_smem),
        ]
        for smem, first, count, *_into in parts:
            heads_of_row = self.rows.at[self.index, pl.ds(first, count)]
            plgpu.copy_gmem_to_smem(heads_of_row, smem.at[pl.ds(0, count)], self.full)
        layer, page, offset = self.layer[0], self.page[self.index], self.offset[self.index]
        angles = [self.room.load_vector(ref.at[self.index]) for ref in (self.cos, self.sin)]
        plgpu.barrier_wait(self.full)
        for smem, first, count, norm, *into in parts:
            is_value = smem is self.v_smem
            if not is_value or self.bias is not None or self.projection.clip or is_fp8:
                self.finish(smem, first, count, norm, None if is_value else angles, *into)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.q_smem.at[pl.ds(0, heads)], self.queries.at[self.index])

        @pl.when(page < self.k_pages.shape[1] - 1)
        def _():
            for smem, pages in ((k_kept, self.k_pages), (v_kept, self.v_pages)):
                plgpu.copy_smem_to_gmem(smem.at[own], pages.at[layer, page, :, offset])
            if is_fp8:

                @pl.loop(0, kv_heads)
                def _(head):
                    self.k_scales[layer, page, head, offset] = self.k_scales_smem[head]
                    self.v_scales[layer, page, head, offset] = self.v_scales_smem[head]

        plgpu.wait_smem_to_gmem(0)

    def finish(self, smem, first: int, count: int, norm, angles, into, scales) -> None:
        """Applies bias, norm, bound and rotation to some heads; the result goes `into` the same
        place, or in eight bits into another, with scales.
        """
        room = self.room
        of_all = norm is not None and len(norm.shape) == 2
        root = self.root_of_all(smem, first, count) if of_all else None
        turned_first = self.projection.turned_first
        for start, heads in self.chunks(count):
            x = self.biased(smem, first, start, heads)
            if angles is not None and turned_first:
                x = [_rounded(part) for part in self.turned(x, angles, heads)]
            if norm is not None:
                x = self.normed(x, norm, start, heads, root)
            if self.projection.clip:
                bound = float(np.asarray(self.projection.clip, BF16))
                x = [jnp.minimum(jnp.maximum(part, -bound), bound) for part in x]
            if angles is not None and not turned_first:
                x = self.turned(x, angles, heads)
            at, x = pl.ds(start, heads), [part.astype(BF16) for part in x]
            if scales is not None:
                wide = [part.astype(F32) for part in x]
                scales[at], inverse = scales_of(_largest(wide))
                inverse = room.spread(inverse, heads, 0)
                numbers = [(part * inverse).astype(E4M3) for part in wide]
                x = [lax.bitcast_convert_type(part, jnp.uint8) for part in numbers]
            for piece, values in zip(room.pieces, x, strict=True):
                into[at, piece] = values

    def turned(self, x: list, angles: list, heads: int) -> list:
        """Returns heads whose first two pieces are rotated, against each other."""
        (a, b, *rest), (cos, sin) = x, (self.room.spread(angle, heads, 1) for angle in angles)
        return [a * cos - b * sin, b * cos + a * sin, *rest]

    def chunks(self, count: int) -> Iterator[tuple[int, int]]:
        """Yields the first of some heads that are in registers together, and how many they are."""
        padded = self.room.padded(count)
        yield from ((start, min(_CHUNK, padded - start)) for start in range(0, padded, _CHUNK))

    def biased(self, smem, first: int, start: int, heads: int) -> list:
        """Loads some heads with their bias."""
        x = self.room.load(smem, start, heads)
        if self.bias is None:
            return x
        bias = self.room.load(self.bias, first + start, heads)
        return [_rounded(a + b) for a, b in zip(x, bias, strict=True)]

    def root_of_all(self, smem, first: int, count: int):
        """Returns what the RMS norm of all `count` heads together scales them by."""
        each = (self.biased(smem, first, *chunk) for chunk in self.chunks(count))
        squares = sum(jnp.sum(_squares(x), axis=0) for x in each)
        return lax.rsqrt(squares / (count * self.room.head_dim) + self.projection.eps)

    def normed(self, x: list, norm, start: int, heads: int, root=None) -> list:
        """Returns the RMS norm of heads whose pieces are `x`; `root` is that of all together."""
        room = self.room
        if root is None:
            root = lax.rsqrt(_squares(x) / room.head_dim + self.projection.eps)
            scale = room.spread(root, heads, 0)
            weights = [room.load_vector(norm.at[piece]).astype(F32) for piece in room.pieces]
            weights = [room.spread(weight, heads, 1) for weight in weights]
        else:
            scale, weights = root, room.load(norm, start, heads)
        apply = _rounded if norm.dtype == jnp.bfloat16 else lambda part: part
        return [
            _rounded(apply(part * scale) * weight) for part, weight in zip(x, weights, strict=True)
        ]


def _squares(x: list):
    """Returns the sum of each head's squares."""
    return jnp.sum(reduce(add, [part * part for part in x]), axis=1)


def _largest(x: list):
    """Returns each head's largest magnitude."""
    return jnp.max(reduce(jnp.maximum, map(jnp.abs, x)), axis=1)


def _rounded(x):
    """Rounds to bfloat16, where the reference has a result of that dtype."""
    return x.astype(BF16).astype(F32)
