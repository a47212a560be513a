"""Which rows a thread block works on: chunks cut into tiles, longest first.

Small arrays, made by half a dozen small kernels. Nothing here depends on the layer, but what is
written in a scan over layers XLA leaves in its loop: step programs make it before (`op.plan`).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

ALIGN = 8
"""TMA reads query rows in tiles of 8: a tile starts at such a row, in the chunk before its own."""

ROW, LO, HI, OFFSET, BLOCKS, CHUNK, KV_LEN, BASE = range(8)
"""Fields of a tile: its first row; the rows [LO, HI) it owns; a row's position is row + OFFSET;
steps over keys; the sequence, and how many positions its pages hold. Over a window, where the tile
begins to read: positions are counted from there."""


def aligned(num_rows: int) -> int:
    """Returns the rows of the padded query array."""
    return -(-num_rows // ALIGN) * ALIGN


class Work(NamedTuple):
    """Tiles in the order they are to be taken; those from `count` on are not to be read."""

    tiles: Int[Array, "tiles 7"] | Int[Array, "tiles 8"]  # a window's have BASE
    count: Int[Array, "1"]


def plan(
    q_start: Int[Array, "N1"],
    kv_len: Int[Array, "N"],
    num_rows: int,
    *,
    block_rows: int,
    block_kv: int,
    window: int = 0,
    align: int = 1,
) -> Work:
    """Cuts `num_rows` rows into tiles of `block_rows`, none of them with rows of two chunks.

    A tile over a `window` reads from its first row's on, rounded down to a multiple of `align`, a
    power of two. Rows past the last chunk are a chunk of their own that has no keys (BLOCKS = 0).
    """
    num_chunks = kv_len.shape[0]
    start = q_start.astype(jnp.int32)
    end = jnp.append(start[1:], jnp.int32(num_rows))
    kv_len = jnp.append(kv_len.astype(jnp.int32), jnp.int32(0))
    first = start // ALIGN * ALIGN
    tiles = jnp.where(end > start, -(-(end - first) // block_rows), 0)
    tiles_end = jnp.cumsum(tiles, dtype=jnp.int32)

    index = jnp.arange(max_tiles(num_rows, num_chunks, block_rows), dtype=jnp.int32)
    chunk = jnp.sum(tiles_end[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    chunk = jnp.minimum(chunk, num_chunks)
    row = first[chunk] + (index - (tiles_end - tiles)[chunk]) * block_rows
    lo = jnp.maximum(row, start[chunk])
    hi = jnp.minimum(row + block_rows, end[chunk])
    length = kv_len[chunk]
    offset, bases = length - end[chunk], []
    if window:
        bases = [jnp.maximum(lo + offset + 1 - window, 0) & -align]
        offset, length = offset - bases[0], length - bases[0]
    blocks = jnp.where(chunk < num_chunks, (hi - 1 + offset) // block_kv + 1, 0)

    # A tile's time follows its steps. Dealt out longest first, all thread blocks end together.
    order = jnp.argsort(jnp.where(index < tiles_end[-1], -blocks, 1))
    fields = jnp.stack([row, lo, hi, offset, blocks, chunk, length, *bases], axis=1)
    return Work(fields[order], tiles_end[-1:])


def max_tiles(num_rows: int, num_chunks: int, block_rows: int) -> int:
    """Returns the largest number of tiles, however rows are cut: each chunk may round up at both
    ends.
    """
    chunks = num_chunks + 1
    return (num_rows + (ALIGN - 1) * chunks) // block_rows + chunks
