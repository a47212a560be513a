"""The trainer's expert computation against a dense one that runs every expert on every row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import matmul, matmul_transposed
from training.dispatch import expert_layer, plan_dispatch

M, D, F, K = 6, 8, 5, 2


def dense(h, weights, ids, gate_up, down):
    hidden = jnp.einsum("td,mdf->mtf", h, gate_up)
    act = jax.nn.silu(hidden[..., :F]) * hidden[..., F:]
    out = jnp.einsum("mtf,mfd->mtd", act, down)
    weight = jnp.einsum("tk,tkm->mt", weights, jax.nn.one_hot(ids, M))
    return jnp.einsum("mt,mtd->td", weight, out)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make(rows, seed):
    rng = np.random.default_rng(seed)
    weights = jnp.asarray(rng.random((rows, K)), jnp.float32)
    ids = jnp.asarray(np.argsort(rng.random((rows, M)), axis=1)[:, :K], jnp.int32)
    experts = normal([seed, 1], M, D, 2 * F), normal([seed, 2], M, F, D)
    return normal([seed, 0], rows, D), weights, ids, *experts


@pytest.mark.parametrize("rows", [1, 33])
def test_equals_dense_with_gradients(rows):
    h, weights, ids, gate_up, down = make(rows, seed=rows)
    probe = normal(99, rows, D)

    def run(layer):
        def scalar(h, weights, gate_up, down):
            return jnp.sum(layer(h, weights, ids, gate_up, down) * probe)

        grad = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1, 2, 3)))
        return grad(h, weights, gate_up, down)

    def ours(h, weights, ids, gate_up, down):
        experts = {"gate_up": gate_up, "down": down}
        return expert_layer(h, weights, ids, experts, capacity=rows)[0]

    got = run(ours)
    want = run(dense)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-4), got, want)


def test_visits_past_capacity_drop_in_row_order():
    ids = jnp.array([[0, 1], [0, 2], [0, 1]], jnp.int32)
    plan = plan_dispatch(ids, num_experts=3, capacity=2)
    assert int(plan.dropped) == 1
    np.testing.assert_array_equal(plan.source, [[0, 1], [0, 2], [1, 3]])
    np.testing.assert_array_equal(plan.cell, [[0, 2], [1, 4], [6, 3]])


@pytest.mark.deep
def test_dropped_visits_add_nothing_and_take_no_gradient():
    h, weights, _, gate_up, down = make(3, seed=0)
    ids = jnp.zeros((3, K), jnp.int32).at[:, 1].set(jnp.array([1, 2, 3], jnp.int32))

    def out(weights):
        experts = {"gate_up": gate_up, "down": down}
        return expert_layer(h, weights, ids, experts, capacity=1)[0]

    kept = weights.at[1:, 0].set(0.0)
    np.testing.assert_allclose(out(weights), dense(h, kept, ids, gate_up, down), atol=1e-4)
    grad = jax.grad(lambda w: jnp.sum(out(w)))(weights)
    np.testing.assert_array_equal(grad[1:, 0], [0.0, 0.0])


@pytest.mark.parametrize("shape", [(4, 3, 5), (2, 4, 3, 5)])
def test_matmul_has_the_gradients_of_matmul(shape):
    *lead, m, k, n = shape
    x, w = normal(0, *lead, m, k), normal(1, *lead, k, n)

    def grads(product):
        loss = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), argnums=(0, 1)))
        return loss(x, w)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads(matmul), grads(jnp.matmul)
    )


def test_a_product_with_transposed_weights_has_its_gradients():
    x, w = normal(0, 4, 3), normal(1, 5, 3)

    def grads(product):
        return jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), argnums=(0, 1)))(x, w)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        grads(matmul_transposed),
        grads(lambda x, w: x @ w.T),
    )
