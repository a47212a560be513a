"""Implementations of prefill attention, and their check against dense float64."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import paged

from benchmarks.kernels.shapes import TINY, Shape
from pallas_kernels.backend import batched_only
from pallas_kernels.paged_attention import common, tiles
from pallas_kernels.paged_attention import mosaic as paged_kernel
from pallas_kernels.prefill_attention import latent, mosaic, prefill_attention


class Implementation(NamedTuple):
    """An implementation, and what it is to be tried on."""

    op: Callable
    run: Callable  # of a function and its arguments
    shapes: tuple[Shape, ...]
    grouped: Shape
    page_sizes: tuple[int, ...]
    lengths: tuple[int, ...]  # of chunks, around those of a tile
    unused: tuple[float, ...]
    dtype: Any
    latent: int = 0  # elements of keys that are the values


def compiled(fn, *args):
    return jax.jit(fn)(*args)


def batched(fn, *args):
    with batched_only():
        return jax.jit(lambda *args: fn(*args))(*args)


def wide(heads, kv_heads, head_dim=64):
    """Returns a shape that the kernel takes."""
    return Shape(f"{heads}:{kv_heads}", 0, 0, 0, 0, heads, kv_heads, head_dim)


IMPLEMENTATIONS = {
    "public": Implementation(
        prefill_attention,
        compiled,
        TINY,
        TINY[3],  # 6 query heads over 2
        (1, 3, 16, 64),
        (31, 32, 33, 64, 70),
        (1e30, np.inf, np.nan),
        np.float32,
    ),
    "native": Implementation(  # where a C++ compiler is found
        prefill_attention,
        compiled,
        (wide(3, 1, 16), wide(2, 2, 80), wide(130, 2, 16)),
        wide(6, 2, 32),
        (1, 3, 64, 128),
        (31, 33, 70),
        (np.inf, np.nan),
        np.float32,
    ),
    "mosaic": Implementation(
        partial(mosaic.prefill_attention, num_blocks=2, interpreted=not interpreter.ON_SM90),
        interpreter.run,
        (wide(3, 1), wide(2, 2)),
        wide(4, 2),
        (16, 64),
        (70,),
        (np.nan,),
        jnp.bfloat16,
    ),
}


def of_latents(q, k_pages, v_pages, *, interpreted=False, **chunks):
    """Runs the kernel in three blocks, which cut rows' keys wherever they can."""
    tile = tiles.choose_latent(k_pages.shape[3])
    assert tile is not None
    assert paged_kernel.supports(q, k_pages, v_pages, chunks["latent"])
    chunks = {"window": 0, "sinks": None, "interpreted": interpreted, **chunks}
    rows = {name: chunks[name] for name in ("q_start", "kv_len", "window", "latent")}
    planned = latent.plan(q.shape[0], q.shape[1], k_pages, **rows)
    tile = dataclasses.replace(tile, min_tiles=1, merge_width=2)
    sizes = common.latent_sizes(q, k_pages, chunks["latent"], tile, 3, chunks["window"])
    todo = planned._replace(schedule=sizes.plan(planned.kv_len))
    return latent.prefill_attention(q, k_pages, todo=todo, tile=tile, num_blocks=3, **chunks)


IMPLEMENTATIONS["batched"] = IMPLEMENTATIONS["public"]._replace(run=batched, lengths=(31, 64, 70))


IMPLEMENTATIONS["sm90"] = IMPLEMENTATIONS["mosaic"]._replace(
    op=partial(mosaic.prefill_attention, num_blocks=2), run=interpreter.emulate
)
LATENTS = wide(3, 1, 11), wide(5, 1, 16)
IMPLEMENTATIONS |= {
    f"{name}-latent": IMPLEMENTATIONS[name]._replace(
        shapes=LATENTS, grouped=LATENTS[1], lengths=(33,), unused=(np.nan,), latent=7
    )
    for name in ("public", "batched")
}
IMPLEMENTATIONS["mosaic-latent"] = IMPLEMENTATIONS["mosaic"]._replace(
    op=partial(of_latents, interpreted=not interpreter.ON_SM90),
    shapes=(wide(8, 1, 128),),
    grouped=wide(16, 1, 192),
    lengths=(),
    latent=128,
)
IMPLEMENTATIONS["sm90-latent"] = IMPLEMENTATIONS["mosaic-latent"]._replace(
    op=of_latents, run=interpreter.emulate
)


def check(
    impl,
    chunks,
    shape=None,
    page_size=None,
    *,
    padding=3,
    unused=0.0,
    dtype=None,
    window=0,
    sinks=None,
    before=0,
):
    """Checks an implementation. `chunks`: (cached positions, new rows) of each sequence. The first
    `before` rows are in no chunk.
    """
    shape, page_size = shape or impl.grouped, page_size or impl.page_sizes[-2]
    dtype = dtype or impl.dtype
    rng = np.random.default_rng(page_size)
    lengths = [cached + new for cached, new in chunks]
    keys, values = paged.make(rng, lengths, shape, dtype)
    max_pages = 1 + -(-max(lengths) // page_size)
    k_pages, v_pages, table = paged.scatter(
        rng, keys, values, page_size, max_pages, unused=unused, dtype=dtype
    )
    q_start = np.concatenate([[0], np.cumsum([new for _, new in chunks])]).astype(np.int32)
    q_start += np.int32(before)
    num_rows = int(q_start[-1])
    windowed = {"window": window} if window else {}
    if sinks is not None:
        sinks = np.resize(sinks, shape.heads).astype(np.float32)
        windowed["sinks"] = jax.device_put(sinks)
    if window:  # what is before the first row's has been freed
        begins = [max(0, cached + 1 - window) for cached, _ in chunks]
        table = paged.slid(table, begins, page_size)
    q = rng.normal(size=(num_rows + padding, shape.heads, shape.head_dim)).astype(dtype)
    scale = shape.head_dim**-0.5
    if impl.latent:
        windowed["latent"], v_pages = impl.latent, None
        values = [k[..., : impl.latent] for k in keys]

    def run(q, k_pages, v_pages, layer, table, q_start, kv_len):
        return impl.op(
            q,
            k_pages,
            v_pages,
            layer=layer,
            block_table=table,
            q_start=q_start,
            kv_len=kv_len,
            scale=scale,
            **windowed,
        )

    q, q_start, kv_len = jax.device_put((q, q_start, np.asarray(lengths, np.int32)))
    args = q, k_pages, v_pages, jnp.int32(paged.LAYER), table, q_start, kv_len
    got, q, q_start = (np.asarray(a) for a in (impl.run(run, *args), q, q_start))
    assert got.dtype == q.dtype
    want = [np.zeros((0, shape.heads, impl.latent or shape.head_dim))]
    for n, (cached, new) in enumerate(chunks):
        for i in range(new):
            seen = cached + i + 1
            own = slice(max(0, seen - window) if window else 0, seen)
            row = paged.attend(q[q_start[n] + i], keys[n][own], values[n][own], scale, sinks)
            want.append(row[None])
    atol = 1e-5 if dtype == np.float32 else 0.03
    want = np.concatenate(want)
    np.testing.assert_allclose(got[before:num_rows].astype(np.float32), want, rtol=0, atol=atol)
    assert not got[num_rows:].any()
