"""Pools and caches of more than 2**31 elements: an index must not be computed flat in int32.

The arrays are sparse: address space that is never touched but for the pages a test writes, handed
to jax without a copy. What an op reads there it has to find, 4 GB past the start.
"""

import mmap
import re
import resource

import jax
import jax.numpy as jnp
import numpy as np
import paged
import pytest

from benchmarks.kernels.shapes import QWEN3_30B_A3B
from jmoe.experts import ExpertPool, write_slots
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.kv_write import Projection, write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import prefill_attention

pytestmark = pytest.mark.deep

ELEMENTS = 2**31


def sparse(*shape):
    """Returns float16 zeros in memory that is only reserved: the host's view, and jax's of the
    same.
    """
    assert np.prod(shape, dtype=np.int64) > ELEMENTS
    size = 2 * int(np.prod(shape, dtype=np.int64))
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        pytest.skip("this machine does not give 4 GB of address space")
    host = np.frombuffer(memory, np.float16).reshape(shape)
    return host, jnp.from_dlpack(host)


@pytest.fixture(autouse=True)
def _no_copy_was_made():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1_500_000, f"{grown} kB: an op copied what it was to index"


def test_expert_pool():
    shape = QWEN3_30B_A3B
    d, f = shape.d_model, shape.d_ff
    num_slots = ELEMENTS // (d * f) + 2  # so that `down` is that large too
    host, gate_up = sparse(num_slots, d, 2 * f)
    host_down, down = sparse(num_slots, f, d)
    rng = np.random.default_rng(0)
    slot = num_slots - 1
    host[slot] = rng.normal(size=(d, 2 * f)) * d**-0.5
    host_down[slot] = rng.normal(size=(f, d)) * f**-0.5
    x = rng.normal(size=(3, d)).astype(np.float16)
    work = routing.dispatch(
        jnp.zeros((3, 1), jnp.int32),
        jnp.ones((3, 1)),
        jnp.asarray([slot], jnp.int32),
        block_m=8,
        max_active=1,
    )
    got = jax.jit(grouped_gemm.moe_mlp)(jnp.asarray(x), gate_up, down, work)
    gate, up = np.split(x.astype(np.float64) @ host[slot].astype(np.float64), 2, axis=1)
    want = (gate / (1 + np.exp(-gate)) * up) @ host_down[slot].astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=0.02)


def test_kv_pages():
    layers, kv_heads, page_size, head_dim = 3, 4, 16, 64
    num_pages = ELEMENTS // (layers * kv_heads * page_size * head_dim) + 2
    (host_k, k_pages), (host_v, v_pages) = (
        sparse(layers, num_pages, kv_heads, page_size, head_dim) for _ in range(2)
    )
    rng = np.random.default_rng(1)
    table = np.array([[num_pages - 1, num_pages - 2]], np.int32)
    k, v = rng.normal(size=(2, 20, kv_heads, head_dim)).astype(np.float16)
    for p in range(20):
        at = layers - 1, table[0, p // page_size], slice(None), p % page_size
        host_k[at], host_v[at] = k[p], v[p]
    q = rng.normal(size=(2, 8, head_dim)).astype(np.float16)
    common = {"layer": jnp.int32(layers - 1), "scale": 0.125, "block_table": jnp.asarray(table)}
    kv_len = jnp.asarray([20], jnp.int32)
    one = jax.jit(paged_attention, static_argnames="scale")(
        jnp.asarray(q[1:]), k_pages, v_pages, kv_len=kv_len, **common
    )
    two = jax.jit(prefill_attention, static_argnames="scale")(
        jnp.asarray(q), k_pages, v_pages, kv_len=kv_len, q_start=jnp.asarray([0, 2]), **common
    )
    want = [paged.attend(q[i], k[: 19 + i], v[: 19 + i], 0.125) for i in range(2)]
    np.testing.assert_allclose(one[0].astype(jnp.float32), want[1], rtol=0, atol=0.01)
    np.testing.assert_allclose(two.astype(jnp.float32), np.stack(want), rtol=0, atol=0.01)


@pytest.mark.parametrize("write", ["slots", "rows"])
def test_writes_index_each_dimension(write):
    """A donated sparse array is a copy of 4 GB, so of writes only the program is looked at."""
    if write == "slots":
        pool = ExpertPool(spec(700, 2048, 1536), spec(1400, 768, 2048))
        assert pool.gate_up.size > ELEMENTS
        one = ExpertPool(spec(1, 2048, 1536), spec(1, 768, 2048))
        text = write_slots.lower(pool, spec(1, dtype=np.int32), one).as_text()
    else:

        def write_two(rows, angles, k_pages, v_pages, layer, at):
            heads = Projection(rows, 4, angles, angles)
            return write_kv(heads, k_pages, v_pages, layer=layer, page=at, offset=at)

        pages, at = spec(48, 6000, 4, 64, 128), spec(2, dtype=np.int32)
        assert pages.size > ELEMENTS
        angles = spec(2, 64, dtype=np.float32)
        args = spec(2, 40, 128), angles, pages, pages, spec(dtype=np.int32), at
        text = jax.jit(write_two).lower(*args).as_text()
    scatters = [line for line in text.splitlines() if "scatter_dims_to_operand_dims" in line]
    assert len(scatters) == 2
    # The update of a slot is indexed by one dimension, that of a row by layer, page and offset.
    dims = "[0]" if write == "slots" else "[0, 1, 3]"
    assert all(f"scatter_dims_to_operand_dims = {dims}" in line for line in scatters)
    assert not re.search(r"stablehlo\.reshape .*(x6000x|<700x|<1400x)", text)


def spec(*shape, dtype=np.float16):
    return jax.ShapeDtypeStruct(shape, dtype)
