"""Contract of the KV page write, against float64 rounded where the op says it rounds."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import pytest

from benchmarks.kernels.shapes import TINY, Shape
from pallas_kernels.kv_write import Projection, split_heads, write_kv
from pallas_kernels.kv_write import mosaic as kernel

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

LAYER, NUM_LAYERS = 1, 3
BF16 = jnp.bfloat16
EPS = 1e-5


def interpreted_kernel(projection, k_pages, v_pages, **at):
    assert kernel.supports(projection, k_pages, v_pages)
    return kernel.write_kv(projection, k_pages, v_pages, **at)


def shape(heads, kv_heads, head_dim):
    return Shape(f"{heads}:{kv_heads} of {head_dim}", 1, 1, 1, 1, heads, kv_heads, head_dim)


@dataclass(frozen=True)
class Implementation:
    """An implementation, and what of the contract it can be held to."""

    op: Callable
    shapes: tuple[Shape, ...]
    dtype: type
    context: Callable[[], AbstractContextManager] = nullcontext


IMPLEMENTATIONS = {
    "public": Implementation(write_kv, TINY, np.float32),
    "public bf16": Implementation(write_kv, (shape(1, 1, 10), shape(6, 2, 64)), BF16),
    "mosaic": Implementation(
        interpreted_kernel,
        # 17 heads: more than are in registers at once, and units that are not full.
        (shape(1, 1, 64), shape(6, 2, 64), shape(17, 1, 128), shape(8, 4, 128), shape(6, 3, 256)),
        BF16,
        mosaic.interpreted,
    ),
}
IMPLEMENTATIONS["sm90"] = replace(IMPLEMENTATIONS["mosaic"], context=mosaic.emulated)
EACH = pytest.mark.parametrize(
    ("op", "of"),
    [
        pytest.param(op, of, id=f"{name}-{of.name}")
        for name, op in IMPLEMENTATIONS.items()
        for of in op.shapes
    ],
)
implementations = pytest.mark.parametrize("op", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def draw(rng, of, num_rows, dtype, *, bias=False, norms=False, positions=None):
    """Draws a projection, with angles as of RoPE."""
    num_heads, half = of.heads + 2 * of.kv_heads, of.head_dim // 2
    positions = rng.integers(0, 5000, num_rows) if positions is None else positions
    angle = positions[:, None] * 1e4 ** (-np.arange(half) / half)

    def normal(*size):
        return jnp.asarray(rng.normal(size=size), dtype)

    return Projection(
        rows=normal(num_rows, num_heads, of.head_dim),
        kv_heads=of.kv_heads,
        cos=jnp.asarray(np.cos(angle), jnp.float32),
        sin=jnp.asarray(np.sin(angle), jnp.float32),
        bias=normal(num_heads, of.head_dim) if bias else None,
        q_norm=normal(of.head_dim) if norms else None,
        k_norm=normal(of.head_dim) if norms else None,
        eps=EPS,
    )


def by_hand(projection):
    """Returns queries, keys and values in float64 [T, heads, D], and how far rounding may take
    each.
    """
    dtype = projection.rows.dtype

    def rounded(x):
        return np.asarray(x.astype(dtype), np.float64)

    x = np.asarray(projection.rows, np.float64)
    if projection.bias is not None:
        x = rounded(x + np.asarray(projection.bias, np.float64))
    bound = rounded(np.asarray(projection.clip))
    cut = [projection.heads, projection.heads + projection.kv_heads]
    *turned, v = np.split(x, cut, axis=1)
    half = projection.cos.shape[-1]
    angle = np.asarray(projection.cos, np.float64) + 1j * np.asarray(projection.sin, np.float64)

    def rotated(part):
        z, rest = part[..., :half] + 1j * part[..., half : 2 * half], part[..., 2 * half :]
        z = z * angle[:, None]
        largest = np.concatenate([np.abs(z), np.abs(z), np.abs(rest)], axis=-1)
        return np.concatenate([z.real, z.imag, rest], axis=-1), largest

    out, slack = [], []
    for part, norm in zip(turned, (projection.q_norm, projection.k_norm), strict=True):
        largest = np.abs(part)
        if projection.turned_first:
            part, largest = rotated(part)
            part = rounded(part)
        if norm is not None:
            shape, part = part.shape, part.reshape(len(part), -1, norm.size)
            root = np.sqrt(np.mean(part * part, axis=-1, keepdims=True) + EPS)
            weight = np.asarray(norm, np.float64)
            part = part / root if norm.dtype == np.float32 else rounded(part / root)
            part = rounded(part * weight).reshape(shape)
            largest = (largest.reshape(len(part), -1, norm.size) / root * np.abs(weight)).reshape(
                shape
            )
        if projection.clip:
            part = np.clip(part, -bound, bound)
        if not projection.turned_first:
            part, largest = rotated(part)
        out.append(part)
        slack.append(largest)
    if projection.clip:
        v = np.clip(v, -bound, bound)
    return [*out, v], [*slack, np.abs(v)]


def close(got, want, slack):
    """Checks that nearly all are as float64 rounds them; others are an ulp apart, or two with
    norms.
    """
    got = np.asarray(got)
    if got.dtype == np.float32:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        return
    assert np.mean(got == want.astype(got.dtype)) > 0.98
    assert (np.abs(got.astype(np.float64) - want) <= 2**-7 * slack).all()


def check(op, projection, page, offset, *, page_size=16, num_pages=5, poison=np.nan):
    """Runs the op on pages full of `poison`; only the named places may change."""
    rng = np.random.default_rng(0)
    dtype = projection.rows.dtype
    size = (NUM_LAYERS, num_pages, projection.kv_heads, page_size, projection.rows.shape[2])
    old = [np.where(rng.random(size) < 0.5, poison, rng.normal(size=size)) for _ in range(2)]
    old = [jnp.asarray(pages, dtype) for pages in old]

    def run(projection, k_pages, v_pages, layer, page, offset):
        projection = Projection(**projection, **fixed)
        return op.op(projection, k_pages, v_pages, layer=layer, page=page, offset=offset)

    arrays = dict(vars(projection))
    names = "kv_heads", "eps", "clip", "turned_first"
    fixed = {name: arrays.pop(name) for name in names}
    places = (jnp.asarray(a, jnp.int32) for a in (page, offset))
    with op.context():
        queries, *new = jax.block_until_ready(jax.jit(run)(arrays, *old, jnp.int32(LAYER), *places))
    (want_q, *want), (slack_q, *slack) = by_hand(projection)
    assert queries.dtype == dtype
    close(queries, want_q, slack_q)
    owned = np.asarray(page) < num_pages - 1
    at = LAYER, np.asarray(page)[owned], slice(None), np.asarray(offset)[owned]
    for before, after, rows, bound in zip(old, new, want, slack, strict=True):
        before, after = np.array(before), np.array(after)
        close(after[at], rows[owned], bound[owned])
        before[at] = after[at]
        # Nobody's page may hold anything; all else has the bits it had, NaN included.
        before[LAYER, -1] = after[LAYER, -1]
        assert before.tobytes() == after.tobytes()


@EACH
@pytest.mark.parametrize("norms", [False, True])
def test_rows_are_finished_and_written_where_the_table_says(op, of, norms):
    rng = np.random.default_rng(of.heads)
    projection = draw(rng, of, 4, op.dtype, bias=not norms, norms=norms)
    check(op, projection, page=[2, 0, 2, 3], offset=[15, 0, 7, 9])


@pytest.mark.parametrize(
    ("name", "of", "changes"),
    [
        pytest.param(name, of, changes, id=f"{name}-{of.name}-{changes}")
        for names, of, each in (
            ("public", TINY[1], ("turn", "norm", "clip", "first", "norm first clip")),
            ("public bf16", shape(6, 2, 64), ("turn", "norm", "clip", "first", "wide")),
            ("mosaic sm90", shape(16, 2, 256), ("wide turn",)),
            ("mosaic sm90", shape(32, 16, 64), ("turn norm clip",)),
            ("mosaic sm90", shape(32, 8, 128), ("first", "turn first clip")),
            # Units that are not full, a model's heads, and several heads a warp.
            ("mosaic sm90", shape(17, 1, 128), ("turn", "turn clip")),
            ("mosaic sm90", shape(16, 16, 128), ("norm", "norm clip")),
            ("mosaic sm90", shape(24, 8, 64), ("norm", "clip")),
            ("mosaic sm90", shape(48, 8, 128), ("turn norm clip",)),
            ("mosaic sm90", shape(8, 8, 256), ("turn", "turn norm clip")),
        )
        for name in ([names] if names in IMPLEMENTATIONS else names.split())
        for changes in each
    ],
)
def test_heads_turn_in_part_are_normed_together_and_bounded(name, of, changes):
    op, rng = IMPLEMENTATIONS[name], np.random.default_rng(3)
    projection = draw(rng, of, 4, op.dtype, bias=True, norms=True)
    if "turn" in changes:
        half = {name: getattr(projection, name)[:, : of.head_dim // 4] for name in ("cos", "sin")}
        projection = replace(projection, **half)
    if "norm" in changes:
        whole = {
            f"{name}_norm": jnp.asarray(rng.normal(size=heads * of.head_dim), op.dtype)
            for name, heads in (("q", of.heads), ("k", of.kv_heads))
        }
        projection = replace(projection, **whole)
    if "wide" in changes:  # as norms that a checkpoint has less 1
        wide = {
            name: getattr(projection, name).astype(jnp.float32) for name in ("q_norm", "k_norm")
        }
        projection = replace(projection, **wide)
    if "clip" in changes:
        projection = replace(projection, clip=0.73)  # no bfloat16
    if "first" in changes:
        projection = replace(projection, turned_first=True)
    check(op, projection, page=[2, 0, 2, 3], offset=[15, 0, 7, 9])


@implementations
def test_a_chunk_that_fills_pages_and_begins_inside_one(op):
    """Rows of a prefill step: positions 13 to 34 of a sequence, its pages in any order."""
    position = np.arange(13, 35)
    projection = draw(np.random.default_rng(0), op.shapes[-2], 22, op.dtype, positions=position)
    check(op, projection, np.asarray([3, 1, 0])[position // 16], position % 16)


@implementations
def test_padding_rows_touch_no_page_but_nobodys(op):
    """Three of them at the same place, as decode steps have them."""
    projection = draw(np.random.default_rng(1), op.shapes[1], 5, op.dtype, norms=True)
    check(op, projection, page=[4, 1, 4, 2, 4], offset=[0, 3, 0, 0, 0])


@implementations
def test_what_is_plain_goes_through_with_its_bits(op):
    """Without bias or norm, at position 0: queries, keys and values are the rows themselves."""
    projection = draw(np.random.default_rng(2), op.shapes[1], 2, op.dtype, positions=np.zeros(2))
    pages = jnp.zeros((1, 2, projection.kv_heads, 1, projection.rows.shape[2]), op.dtype)
    at = {"layer": jnp.int32(0), "page": jnp.asarray([0, 1]), "offset": jnp.zeros(2, jnp.int32)}
    with op.context():
        out = jax.block_until_ready(op.op(projection, pages, pages, **at))
    rows = np.split(np.asarray(projection.rows[0]), np.cumsum([projection.heads, out[1].shape[2]]))
    np.testing.assert_array_equal(out[0][0], rows[0])
    for written, want in zip(out[1:], rows[1:], strict=True):
        np.testing.assert_array_equal(written[0, 0, :, 0], want)


@implementations
def test_layer_is_traced(op):
    """In a scan over layers, as a step program has it."""
    projection = draw(np.random.default_rng(3), op.shapes[1], 1, op.dtype)
    pages = jnp.zeros((2, 3, projection.kv_heads, 1, projection.rows.shape[2]), op.dtype)
    at = {"page": jnp.asarray([1]), "offset": jnp.zeros(1, jnp.int32)}

    def run(k_pages, v_pages):
        def one(pages, layer):
            queries, *pages = op.op(projection, *pages, layer=layer, **at)
            return tuple(pages), queries

        return jax.lax.scan(one, (k_pages, v_pages), jnp.arange(2))

    with op.context():
        new, queries = jax.block_until_ready(jax.jit(run)(pages, pages))
    want = jax.jit(lambda: split_heads(projection))()
    np.testing.assert_array_equal(queries[1], want[0])
    for written, rows in zip(new, want[1:], strict=True):
        np.testing.assert_array_equal(written[:, 1, :, 0], np.stack([rows[0], rows[0]]))
        assert not np.asarray(written[:, [0, 2]], np.float32).any()


def test_heads_without_pages():
    projection = draw(np.random.default_rng(4), TINY[2], 3, np.float32, bias=True, norms=True)
    for got, want in zip(split_heads(projection), by_hand(projection)[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
