"""Contract of paged decode attention, against dense float64."""

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import paged
import pytest

from benchmarks.kernels.shapes import TINY, Shape
from pallas_kernels.backend import batched_only
from pallas_kernels.paged_attention import mosaic as kernel
from pallas_kernels.paged_attention import paged_attention, tiles

# The references are held to float64; a kernel's PTX is the same, however XLA is told to compile.
pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


def interpreted_kernel(q, k_pages, v_pages, **kwargs):
    """Runs the kernel in three blocks, which cut sequences wherever they can."""
    tile = tiles.choose(q.shape[2], k_pages.shape[3])
    assert tile is not None
    assert kernel.supports(q, k_pages, v_pages)
    tile = replace(tile, tokens=64, min_tiles=1, merge_width=2)
    return kernel.paged_attention(q, k_pages, v_pages, tile=tile, num_blocks=3, **kwargs)


def kernel_of_latents(q, k_pages, v_pages, *, interpreted=False, **kwargs):
    tile = tiles.choose_latent(k_pages.shape[3])
    assert tile is not None
    assert kernel.supports(q, k_pages, v_pages, kwargs["latent"])
    kwargs |= {"tile": replace(tile, min_tiles=1, merge_width=2), "num_blocks": 3}
    return kernel.paged_attention(q, k_pages, v_pages, interpreted=interpreted, **kwargs)


@dataclass(frozen=True)
class Implementation:
    """An implementation, and what of the contract it can be held to."""

    op: Callable
    shapes: tuple[Shape, ...]
    page_sizes: tuple[int, ...]
    dtype: type = np.float32
    atol: float = 1e-5
    context: Callable[[], AbstractContextManager] = nullcontext
    latent: int = 0  # elements of keys that are the values

    @property
    def grouped(self) -> Shape:
        return self.shapes[-1]


IMPLEMENTATIONS = {
    "public": Implementation(paged_attention, TINY, (1, 2, 7, 16, 64)),
    "batched": Implementation(paged_attention, TINY, (1, 2, 7, 16, 64), context=batched_only),
    "mosaic": Implementation(
        interpreted_kernel,
        (
            Shape("one head", 1, 1, 1, 1, 1, 1, 64),
            Shape("grouped 7:1", 1, 1, 1, 1, 7, 1, 128),
            Shape("grouped 6:2", 1, 1, 1, 1, 6, 2, 64),
        ),
        (16, 64),
        jnp.bfloat16,
        0.015,
        mosaic.interpreted,
    ),
}
IMPLEMENTATIONS["sm90"] = replace(IMPLEMENTATIONS["mosaic"], context=mosaic.emulated)
LATENTS = (Shape("latents", 1, 1, 1, 1, 3, 1, 11), Shape("latents in C++", 1, 1, 1, 1, 6, 1, 16))
IMPLEMENTATIONS |= {
    "public-latent": replace(IMPLEMENTATIONS["public"], shapes=LATENTS, latent=7),
    "batched-latent": replace(IMPLEMENTATIONS["batched"], shapes=LATENTS, latent=7),
    "mosaic-latent": Implementation(
        functools.partial(kernel_of_latents, interpreted=not mosaic.ON_SM90),
        (Shape("128 heads", 1, 1, 1, 1, 128, 1, 128), Shape("8 heads", 1, 1, 1, 1, 8, 1, 192)),
        (16, 64),
        jnp.bfloat16,
        0.015,
        mosaic.interpreted,
        latent=128,
    ),
}
IMPLEMENTATIONS["sm90-latent"] = replace(
    IMPLEMENTATIONS["mosaic-latent"], op=kernel_of_latents, context=mosaic.emulated
)


def each(of):
    """Returns each implementation with each value that `of` gives for it."""
    return [
        pytest.param(op, x, id=f"{name}-{getattr(x, 'name', x)}")
        for name, op in IMPLEMENTATIONS.items()
        for x in of(op)
    ]


implementations = pytest.mark.parametrize("op", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def check(
    op,
    lengths,
    page_size,
    *,
    shape=None,
    unused=0.0,
    extra_pages=2,
    dtype=None,
    atol=None,
    sinks=None,
    own_sinks=False,
    **windowed,
):
    shape, dtype, atol = shape or op.grouped, dtype or op.dtype, atol or op.atol
    rng = np.random.default_rng(page_size)
    keys, values = paged.make(rng, lengths, shape, dtype)
    max_pages = extra_pages + -(-max(lengths) // page_size)
    pages = paged.scatter(rng, keys, values, page_size, max_pages, unused=unused, dtype=dtype)
    q = rng.normal(size=(len(lengths), shape.heads, shape.head_dim)).astype(dtype)
    scale = shape.head_dim**-0.5
    k_pages, v_pages, table = pages
    if op.latent:
        windowed["latent"], v_pages = op.latent, None
        values = [k[..., : op.latent] for k in keys]
    if window := windowed.get("window"):  # what is before it has been freed
        table = paged.slid(table, [max(0, n - window) for n in lengths], page_size)
        keys, values = ([a[-window:] for a in each] for each in (keys, values))

    of_rows = [None] * len(lengths)
    if sinks is not None:
        of_rows = np.resize(sinks, (len(lengths), shape.heads)).astype(np.float32)
        sinks = of_rows if own_sinks else of_rows[0]
        of_rows = np.broadcast_to(sinks, of_rows.shape)
        windowed["sinks"] = jax.device_put(sinks)

    def run(q, k_pages, v_pages, layer, table, kv_len):
        attend = functools.partial(op.op, layer=layer, block_table=table, kv_len=kv_len, **windowed)
        return attend(q, k_pages, v_pages, scale=scale)

    layer = jnp.int32(paged.LAYER)
    with op.context():
        on_device = jax.device_put((q, np.asarray(lengths, np.int32)))
        got = jax.jit(run)(on_device[0], k_pages, v_pages, layer, table, on_device[1])
        got = np.asarray(jax.block_until_ready(got))
    assert got.dtype == q.dtype
    each = zip(q, keys, values, [scale] * len(q), of_rows, strict=True)
    want = list(itertools.starmap(paged.attend, each))
    np.testing.assert_allclose(got.astype(np.float32), np.stack(want), rtol=0, atol=atol)
    return got


@pytest.mark.sized(deep=("mosaic-one head",))
@pytest.mark.parametrize(("op", "shape"), each(lambda op: op.shapes))
def test_query_heads_share_kv_heads(op, shape):
    check(op, [5, 1, 17, 9], min(16, 4 * op.page_sizes[0]), shape=shape)


@pytest.mark.parametrize(("op", "page_size"), each(lambda op: op.page_sizes))
def test_lengths_at_page_borders(op, page_size):
    lengths = [1, page_size, page_size + 1, max(2 * page_size - 1, 1), 2 * page_size, 130]
    check(op, lengths, page_size)


@pytest.mark.parametrize(("heads", "taken"), [(32, True), (33, False), (40, False)])
def test_a_group_at_which_the_kernel_would_spill_registers_is_not_taken(heads, taken):
    q, pages = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, heads, 256), (1, 4, 1, 64, 256))
    )
    assert kernel.supports(q, pages, pages) == taken


def test_values_are_given_once():
    q, pages = jnp.zeros((1, 2, 8)), jnp.zeros((1, 2, 1, 4, 8))
    rows = {"layer": jnp.int32(0), "block_table": jnp.zeros((1, 1), jnp.int32)}
    rows |= {"kv_len": jnp.ones(1, jnp.int32), "scale": 1.0}
    for values, latent in ((None, 0), (pages, 4)):
        with pytest.raises(ValueError, match=f"latent is {latent}; give v_pages or"):
            paged_attention(q, pages, values, latent=latent, **rows)


@implementations
def test_padding_rows_are_zero(op):
    got = check(op, [0, 6, 0, 0], 16)
    assert not got[[0, 2, 3]].any()


@implementations
def test_only_padding_rows(op):
    assert not check(op, [0, 0], 16).any()


@implementations
def test_a_table_no_longer_than_its_pages(op):
    check(op, [64, 3], 16, extra_pages=0)


@implementations
@pytest.mark.parametrize("unused", [1e30, np.inf, np.nan])
def test_what_unused_rows_hold_does_not_matter(op, unused):
    """They hold what another sequence left there, and that one may have overflowed."""
    check(op, [5, 0, 64, 67, 1], 16, unused=unused)


@pytest.mark.parametrize(("op", "window"), each(lambda op: (70, 1, 5, 64, 1000)))
def test_a_window_is_all_that_is_read(op, window):
    lengths = [5, 0, 64, 300, 1, window, window + 1]
    check(op, lengths, 16, window=window, unused=np.nan)


@implementations
def test_a_sink_takes_weight_once_however_a_sequence_is_cut(op):
    """One a head, of both signs, larger and smaller than all scores; a row of no key has none."""
    check(op, [5, 0, 64, 300, 1], 16, sinks=[-3.0, 1.5, 0.0, 40.0, -60.0], unused=np.nan)


@implementations
def test_rows_may_have_sinks_of_their_own(op):
    """Rows of several models in one step."""
    check(op, [5, 0, 130, 1], 16, sinks=[-3.0, 1.5, 0.0, 4.0, -6.0], own_sinks=True)


@pytest.mark.deep
@implementations
def test_a_sink_beside_a_window(op):
    """It is taken in with the first tile in the window."""
    lengths, sinks = [5, 0, 64, 270, 1], [-3.0, 1.5, 40.0]
    check(op, lengths, op.page_sizes[-1], window=90, sinks=sinks, unused=np.nan)


@implementations
def test_bfloat16_cache(op):
    check(op, [5, 33, 70], 16, dtype=jnp.bfloat16, atol=0.03)


@implementations
def test_scores_far_apart_keep_their_precision(op):
    """The running maximum moves by hundreds between one step over the keys and the next."""
    rng = np.random.default_rng(0)
    shape = op.grouped
    keys, values = paged.make(rng, [200], shape, op.dtype)
    growth = np.linspace(1, 480 / shape.head_dim, 200)[:, None, None]
    keys[0] = (keys[0] * growth.astype(np.float32)).astype(op.dtype)
    k_pages, v_pages, table = paged.scatter(rng, keys, values, 16, 13, dtype=op.dtype)
    q = rng.normal(size=(1, shape.heads, shape.head_dim)).astype(op.dtype)
    common = {"layer": jnp.int32(paged.LAYER), "block_table": table, "scale": 1.0}
    if op.latent:
        common["latent"], v_pages, values = op.latent, None, [keys[0][..., : op.latent]]
    with op.context():
        got = op.op(jnp.asarray(q), k_pages, v_pages, kv_len=jnp.asarray([200]), **common)
        jax.block_until_ready(got)
    want = paged.attend(q[0], keys[0], values[0], 1.0)
    np.testing.assert_allclose(got[0].astype(jnp.float32), want, rtol=0, atol=10 * op.atol)
