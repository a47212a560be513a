"""A matrix product whose gradients are products of plain row-major operands.

XLA's CPU backend reaches its fast kernels (bfloat16 above all) only for `[.., m, k] @ [.., k, n]`
in memory order; the transposed products of autodiff fall to a path ten times slower. Here the
transposes are made real, behind barriers, so that the compiler cannot fold them back.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float


def _transposed(x: Float[Array, "... a b"]) -> Float[Array, "... b a"]:
    moved = with_layout_constraint(jnp.swapaxes(x, -1, -2), Layout(tuple(range(x.ndim))))
    return jax.lax.optimization_barrier(moved)


def _times_transposed(
    x: Float[Array, "... m n"], w: Float[Array, "... k n"]
) -> Float[Array, "... m k"]:
    batch, last = tuple(range(x.ndim - 2)), (x.ndim - 1,)
    return jax.lax.dot_general(x, w, ((last, last), (batch, batch)))


@jax.custom_vjp
def matmul(x: Float[Array, "... m k"], w: Float[Array, "... k n"]) -> Float[Array, "... m n"]:
    """Computes `x @ w` for operands of one dtype and equal leading axes (none, one or several)."""
    return jnp.matmul(x, w)


def _forward(x, w):
    return jnp.matmul(x, w), (x, w)


def _backward(saved, grad):
    x, w = saved
    grad = jax.lax.optimization_barrier(grad)
    return _times_transposed(grad, w), jnp.matmul(_transposed(x), grad)


matmul.defvjp(_forward, _backward)


def linear(x: Float[Array, "... k"], w: Float[Array, "k n"]) -> Float[Array, "... n"]:
    """Computes `x @ w` for rows with any leading axes and one matrix."""
    return matmul(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[-1])
