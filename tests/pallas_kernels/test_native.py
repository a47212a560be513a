"""The C++ forms for CPUs beside XLA's references, in sizes and lengths drawn at random."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_gemm, native, routing
from pallas_kernels.activation import Gelu
from pallas_kernels.backend import noting, references_only
from pallas_kernels.matmul import LayerOf, matmul, matmul_transposed
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import prefill_attention

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.fixture(scope="module", autouse=True)
def _there():
    if not native.LIBRARY.is_there:
        pytest.skip("no C++ compiler is found: c++, or what CXX names")


def compare(op, *args, **kwargs):
    """Returns the C++ form's result and the reference's; checks that each is what it is called.

    Arrays are arguments of the program: of constants XLA computes all that it can as it compiles.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def run(arrays):
        given = dict(enumerate(leaves)) | dict(zip(at, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, given.values())
        return op(*args, **kwargs)

    arrays = [leaves[i] for i in at]
    with noting() as forms:
        ours = jax.jit(run)(arrays)
    assert set(forms.values()) == {"C++"}
    with references_only(), noting() as forms:
        theirs = jax.jit(lambda arrays: run(arrays))(arrays)
    assert set(forms.values()) == {"XLA"}
    return np.asarray(ours), np.asarray(theirs)


def attention_case(rng, rows, heads, kv_heads, dim, page, max_pages, layers=2):
    num_pages = rows * max_pages + 1
    shape = layers, num_pages, kv_heads, page, dim
    k, v = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    table = rng.permutation(num_pages)[: rows * max_pages].reshape(rows, max_pages)
    lengths = rng.integers(0, max_pages * page + 1, rows)
    lengths[:3] = [0, 1, max_pages * page][:rows]
    for row, length in enumerate(lengths):  # what others left in pages may be anything
        for at in range(length, max_pages * page):
            for pages in (k, v):
                pages[:, table[row, at // page], :, at % page] = (np.inf, np.nan)[at % 2]
    q = rng.normal(size=(rows, heads, dim)).astype(np.float32)
    rows_of = {"block_table": jnp.asarray(table, jnp.int32)}
    rows_of["kv_len"] = jnp.asarray(lengths, jnp.int32)
    return [jnp.asarray(x) for x in (q, k, v)], rows_of | {"layer": jnp.int32(1), "scale": 0.3}


SHAPES = [  # rows, heads, kv heads, head size, page size, pages
    (7, 4, 2, 32, 16, 5),
    (1, 8, 8, 16, 1, 9),
    (64, 4, 2, 32, 64, 2),
    (5, 12, 1, 80, 7, 6),
    (3, 16, 2, 128, 128, 2),
    (4, 2, 2, 256, 24, 3),
]


QUICK = {f"21-{SHAPES[0]}", f"0-{SHAPES[3]}"}


@pytest.mark.sized(
    deep=[one for w in (0, 1, 21) for s in SHAPES if (one := f"{w}-{s}") not in QUICK]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [0, 1, 21])
def test_attention_is_the_references(shape, window):
    rng = np.random.default_rng(sum(shape) + window)
    arrays, rows = attention_case(rng, *shape)
    for sinks in (None, rng.normal(size=shape[1]), rng.normal(size=shape[:2])):
        sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)
        ours, theirs = compare(paged_attention, *arrays, **rows, window=window, sinks=sinks)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)
    assert not ours[0].any()  # padding


@pytest.mark.parametrize("scale", [1e-3, 40.0])
def test_scores_may_lie_far_apart(scale):
    arrays, rows = attention_case(np.random.default_rng(3), *SHAPES[0])
    ours, theirs = compare(paged_attention, *arrays, **rows | {"scale": scale})
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)


def test_a_rows_attention_is_the_same_bits_in_every_batch():
    (q, k, v), rows = attention_case(np.random.default_rng(4), *SHAPES[0])
    table, lengths = rows.pop("block_table"), rows.pop("kv_len")

    def run(at):
        at = np.array(at)
        found = paged_attention(q[at], k, v, block_table=table[at], kv_len=lengths[at], **rows)
        return np.asarray(found)

    whole = run(range(7))
    np.testing.assert_array_equal(run([5, 2, 6])[1], whole[2])
    np.testing.assert_array_equal(np.concatenate([run([i]) for i in range(7)]), whole)


def prefill_case(rng, *shape):
    """Returns chunks that end what `attention_case` draws, and two rows of padding."""
    (q, *pages), rows = attention_case(rng, *shape)
    new = [rng.integers(0, length + 1) for length in np.asarray(rows["kv_len"])]
    rows["q_start"] = jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32)
    q = rng.normal(size=(sum(new) + 2, *q.shape[1:]))
    return [jnp.asarray(q, jnp.float32), *pages], rows


@pytest.mark.sized(
    deep=[one for w in (0, 1, 21) for s in SHAPES if (one := f"{w}-{s}") not in QUICK]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [0, 1, 21])
def test_prefill_attention_is_the_references(shape, window):
    rng = np.random.default_rng(sum(shape) + window)
    arrays, rows = prefill_case(rng, *shape)
    for sinks in (None, jnp.asarray(rng.normal(size=shape[1]), jnp.float32)):
        ours, theirs = compare(prefill_attention, *arrays, **rows, window=window, sinks=sinks)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)
    assert not ours[-2:].any()  # padding


@pytest.mark.parametrize("scale", [1e-3, 40.0])
def test_scores_of_a_chunk_may_lie_far_apart(scale):
    arrays, rows = prefill_case(np.random.default_rng(3), *SHAPES[0])
    ours, theirs = compare(prefill_attention, *arrays, **rows | {"scale": scale})
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)  # of scores of 1,000


@pytest.mark.parametrize("window", [0, 9])
def test_a_chunks_attention_is_the_same_bits_in_every_batch_and_cut_anywhere(window):
    (q, k, v), rows = prefill_case(np.random.default_rng(6), *SHAPES[0])
    table, lengths, start = (np.asarray(rows.pop(n)) for n in ("block_table", "kv_len", "q_start"))

    def run(chunks):
        """Attends with chunks (sequence, first row, last row)."""
        at, first, last = np.array(chunks).T
        found = prefill_attention(
            q[np.concatenate([np.arange(a, b) for _, a, b in chunks])],
            k,
            v,
            block_table=jnp.asarray(table[at]),
            kv_len=jnp.asarray(lengths[at] - (start[at + 1] - last), jnp.int32),
            q_start=jnp.asarray(np.concatenate([[0], np.cumsum(last - first)]), jnp.int32),
            window=window,
            **rows,
        )
        return np.asarray(found)

    whole = run([(n, start[n], start[n + 1]) for n in range(7)])
    assert start[3] - start[2] > 60
    for n in (6, 2):
        a, b = start[n], start[n + 1]
        np.testing.assert_array_equal(run([(n, a, b)]), whole[a:b])
        for cut in (a + 1, b - 7):
            np.testing.assert_array_equal(run([(n, a, cut), (n, cut, b)]), whole[a:b])


def expert_case(rng, rows, picks, experts, width, hidden, idle=0):
    up = rng.normal(size=(2 * experts, width, 2 * hidden)) / width**0.5
    down = rng.normal(size=(2 * experts, hidden, width)) / hidden**0.5
    x, weights = rng.normal(size=(rows, width)), rng.random((rows, picks))
    ids = np.stack([rng.permutation(experts)[:picks] for _ in range(rows)])
    ids[rows - idle :] = -1
    ids[rng.random(ids.shape) < 0.1] = -1  # dropped visits
    return [jnp.asarray(a, jnp.float32) for a in (x, up, down, weights)], ids.astype(np.int32)


def run_experts(arrays, ids, experts, **kwargs):
    x, up, down, weights = arrays
    plan = routing.dispatch(
        jnp.asarray(ids),
        weights,
        jnp.arange(experts, dtype=jnp.int32) + experts,
        block_m=grouped_gemm.BLOCK_M,
        max_active=experts,
    )
    return grouped_gemm.moe_mlp(x, up, down, plan, **kwargs)


compiled_experts = jax.jit(run_experts, static_argnums=2)


@pytest.mark.sized(deep=("(64, 4, 60, 128, 96, 5)",))
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 3, 16, 16),
        (1, 4, 60, 128, 96),
        (9, 2, 8, 48, 32),
        (64, 4, 60, 128, 96, 5),
        (130, 8, 9, 64, 80, 129),
        (70, 1, 1, 336, 160),
    ],
    ids=str,
)
def test_experts_are_the_references(shape):
    rng = np.random.default_rng(sum(shape))
    arrays, ids = expert_case(rng, *shape)
    ours, theirs = compare(run_experts, arrays, ids, shape[2])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


def test_a_rows_experts_are_the_same_bits_in_every_batch():
    arrays, ids = expert_case(np.random.default_rng(7), 40, 3, 5, 144, 80)
    x, up, down, weights = arrays
    whole = np.asarray(compiled_experts(arrays, ids, 5))
    for row in (0, 13, 39):
        alone = compiled_experts([x[row][None], up, down, weights[row][None]], ids[row][None], 5)
        np.testing.assert_array_equal(np.asarray(alone)[0], whole[row])


def test_what_is_not_finite_stays_with_its_row():
    arrays, ids = expert_case(np.random.default_rng(8), 12, 2, 4, 32, 32)
    clean = np.asarray(compiled_experts(arrays, ids, 4))
    ids[3] = [0, 1]
    arrays[0] = arrays[0].at[3].set(jnp.nan)
    found = np.asarray(compiled_experts(arrays, ids, 4))
    assert np.isnan(found[3]).all()
    others = np.arange(12) != 3
    np.testing.assert_array_equal(found[others], clean[others])


def test_large_gates_are_silus():
    arrays, ids = expert_case(np.random.default_rng(9), 8, 2, 4, 32, 32)
    arrays[0] = arrays[0] * 200
    ours, theirs = compare(run_experts, arrays, ids, 4)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-3)


def check_bfloat16(run, *arrays):
    """Checks that what is computed of bfloat16 is what is computed of the same numbers in float32,
    rounded once, and close to the reference's.
    """
    low = [a.astype(jnp.bfloat16) for a in arrays]
    wide = [a.astype(jnp.float32) for a in low]
    ours, theirs = compare(run, *low)
    assert ours.dtype == jnp.bfloat16
    exact = jax.jit(run)(*wide).astype(jnp.bfloat16)
    np.testing.assert_array_equal(ours.astype(np.float32), np.asarray(exact.astype(jnp.float32)))
    np.testing.assert_allclose(
        ours.astype(np.float32), theirs.astype(np.float32), rtol=0.02, atol=0.05
    )


@pytest.mark.sized(deep=("(5, 12, 1, 80, 7, 6)",))
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)
def test_bfloat16_is_float32_rounded_once(shape):
    rng = np.random.default_rng(11)
    arrays, rows = attention_case(rng, *shape)
    check_bfloat16(lambda *a: paged_attention(*a, **rows, window=9), *arrays)
    arrays, rows = prefill_case(rng, *shape)
    check_bfloat16(lambda *a: prefill_attention(*a, **rows), *arrays)
    for experts in ((9, 2, 8, 48, 32), (70, 3, 5, 64, 96)):  # few rows, and many
        (*arrays, weights), ids = expert_case(rng, *experts)
        check_bfloat16(
            lambda *a, w=weights, i=ids, n=experts[2]: run_experts([*a, w], i, n), *arrays
        )


@pytest.mark.deep
def test_other_dtypes_sizes_and_activations_are_left_to_xla():
    (q, k, v), rows = attention_case(np.random.default_rng(5), 2, 2, 2, 24, 4, 2)
    arrays, ids = expert_case(np.random.default_rng(6), 4, 2, 4, 24, 16)
    even, even_ids = expert_case(np.random.default_rng(6), 4, 2, 4, 32, 16)
    low = [a.astype(jnp.float16) for a in even[:3]]
    for run in (
        lambda: paged_attention(q, k, v, **rows),
        lambda: prefill_attention(q, k, v, q_start=jnp.zeros(3, jnp.int32), **rows),
        lambda: run_experts(arrays, ids, 4),
        lambda: run_experts([*low, even[3]], even_ids, 4),
        lambda: run_experts(even, even_ids, 4, activation=Gelu()),
    ):
        with noting() as forms:
            run()
        assert set(forms.values()) == {"XLA"}


@pytest.mark.sized(deep=("CXX=no-such-compiler", "CXX=/bin/false"))
@pytest.mark.parametrize("variable", ["JMOE_NATIVE=0", "CXX=no-such-compiler", "CXX=/bin/false"])
def test_without_a_compiler_there_is_xla(variable, monkeypatch, tmp_path):
    name, value = variable.split("=")
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    code = "from pallas_kernels import native; print(native.LIBRARY.is_there)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "False"


@pytest.mark.exhaustive
def test_where_nothing_can_be_kept_nothing_is_left(tmp_path):
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.write_text("no folder")
    temporary.mkdir()
    code = "from pallas_kernels import native; print(native.LIBRARY.is_there)"
    quick = tmp_path / "c++"
    quick.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    quick.chmod(0o755)
    env = {**os.environ, "HOME": str(home), "TMPDIR": str(temporary), "CXX": str(quick)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "True", done.stderr
    assert not list(temporary.glob("jmoe-*"))


@pytest.mark.parametrize("wanted", [None, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", [(2, 36, 16), (3, 64, 208), (1, 300, 1040)], ids=str)
def test_projections_are_their_layers_products(shape, dtype, wanted):
    rng = np.random.default_rng(0)
    layer, rtol = shape[0] - 1, 2e-6 if wanted or dtype == jnp.float32 else 4e-3
    stack = jnp.asarray(rng.normal(size=shape), dtype)
    rows = jnp.asarray(rng.normal(size=(native.most_projected(stack.dtype), shape[1])), dtype)
    run = jax.jit(lambda x: LayerOf(stack, jnp.int32(layer)).product(x, wanted))
    alone = run(rows[-1:])
    for x in (rows[-7:], rows[-25:], rows):
        assert native.projects(x, stack)
        np.testing.assert_array_equal(
            run(x), jax.jit(matmul, static_argnums=2)(x, stack[layer], wanted)
        )
        got, exact = run(x), np.asarray(x, np.float64) @ np.asarray(stack[layer], np.float64)
        assert got.dtype == (wanted or dtype)
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=rtol, atol=4e-5)
        np.testing.assert_array_equal(alone[0], got[-1])  # the same bits in every batch


@pytest.mark.parametrize(("rows", "columns"), [(513, 64), (4, 60)])
def test_what_is_not_projected_in_place_is_sliced(rows, columns):
    x, stack = jnp.ones((rows, 8)), jnp.arange(3 * 8 * columns, dtype=jnp.float32)
    stack = stack.reshape(3, 8, columns)
    assert not native.projects(x, stack)
    weights = LayerOf(stack, jnp.int32(1))
    assert (weights.shape, weights.dtype) == ((8, columns), jnp.float32)
    np.testing.assert_allclose(weights.product(x), x @ stack[1], rtol=1e-6)
    np.testing.assert_array_equal(jnp.asarray(weights), stack[1])


@pytest.mark.parametrize("product", [matmul, matmul_transposed])
def test_a_lone_row_in_bfloat16_is_multiplied_as_one_of_two(product, monkeypatch):
    monkeypatch.setattr(native, "projects", lambda x, w: False)  # as where there is no compiler
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((3, 48), (48, 48)))
    run = jax.jit(product, static_argnums=2)
    np.testing.assert_array_equal(run(x[:1], w, jnp.float32)[0], run(x, w, jnp.float32)[0])
    dots = [line for line in run.lower(x[:1], w).as_text().splitlines() if "dot_general" in line]
    assert dots
    assert all("tensor<2x48xbf16>" in line for line in dots)


def test_gradients_of_few_rows_are_those_of_many():
    rng = np.random.default_rng(3)
    x, w = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((40, 24), (24, 32)))

    def loss(x, w):
        return jnp.sum(jnp.sin(matmul(x, w)))

    parts = [jax.grad(loss, (0, 1))(x[i : i + 10], w) for i in range(0, 40, 10)]
    of_x, of_w = jax.grad(loss, (0, 1))(x, w)
    np.testing.assert_allclose(jnp.concatenate([part[0] for part in parts]), of_x, rtol=2e-5)
    np.testing.assert_allclose(sum(part[1] for part in parts), of_w, rtol=2e-4, atol=2e-5)
    mapped = jax.vmap(matmul, (0, None))(x.reshape(4, 10, 24), w)
    np.testing.assert_allclose(mapped.reshape(40, 32), x @ w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 24])
def test_plan_and_dispatch_are_the_references_to_the_bit(rows):
    experts, united = 9, 3
    options = {"top_k": 4, "normalize": True, "scale": 2.5}
    sizes = {"block_m": 4, "max_active": experts + united}

    def run(given):
        return routing.route(**given, **options, **sizes)

    forms = []
    for seed in range(40):
        rng = np.random.default_rng((rows, seed))
        groups = np.where(rng.random(experts) < 0.2, -1, rng.integers(0, united, experts))
        code = rng.choice(list(routing.STRATEGIES.values())) + routing.BY_WEIGHT * (seed % 2)
        given = {
            "logits": jnp.asarray(rng.integers(-3, 3, (rows, experts)), jnp.float32),  # with ties
            "groups": jnp.asarray(groups, jnp.int32),
            "slots": jnp.asarray(rng.permutation(experts + united), jnp.int32),
            "threshold_percent": jnp.int32(rng.integers(0, 101)),
            "strategy": jnp.int32(code),
            "valid": jnp.asarray(rng.random(rows) < 0.8),
            "exempt": jnp.asarray(rng.random(rows) < 0.3),
        }
        if seed == 0:
            ours, theirs = jax.jit(run), jax.jit(lambda given: run(given))
            with references_only(), noting() as noted:
                theirs(given)
            forms.append(noted["routing"])
            with noting() as noted:
                ours(given)
            forms.append(noted["routing"])
        jax.tree.map(np.testing.assert_array_equal, ours(given), theirs(given))
    assert forms == ["XLA", "C++"]
