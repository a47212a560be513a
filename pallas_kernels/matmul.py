"""Products with weights, with gradients that are products of plain row-major operands.

XLA's CPU backend reaches its fast kernels (bfloat16 above all) only for `[.., m, k] @ [.., k, n]`
in memory order; the transposed products of autodiff fall to a path ten times slower. Here the
transposes are made real, behind barriers, so that the compiler cannot fold them back. Serving takes
no gradients and gets the plain product.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from pallas_kernels import native
from pallas_kernels.backend import backend


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerOf:
    """A layer's weights in a stack of all layers', which on a CPU a product of few rows reads in
    place: a slice would be a copy.
    """

    stack: Float[Array, "layers k n"]
    layer: Int[Array, ""]

    @property
    def dtype(self) -> Any:
        """Returns the weights' dtype."""
        return self.stack.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the layer's."""
        return self.stack.shape[1:]

    def __jax_array__(self) -> Float[Array, "k n"]:
        """Returns the slice, for readers that multiply nothing by it."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.layer, 0, keepdims=False)

    def product(self, x: Float[Array, "m k"], dtype: Any = None) -> Float[Array, "m n"]:
        """Computes what `matmul` does, to the bit."""
        if not native.projects(x, self.stack):
            return matmul(x, self.__jax_array__(), dtype)
        return native.project(x, self.stack, self.layer).astype(dtype or self.dtype)


def _transposed(x: Float[Array, "... a b"]) -> Float[Array, "... b a"]:
    moved = with_layout_constraint(jnp.swapaxes(x, -1, -2), Layout(tuple(range(x.ndim))))
    return jax.lax.optimization_barrier(moved)


def _is_slow_alone(x: Float[Array, "... m k"]) -> bool:
    """Returns whether XLA's CPU backend takes twenty times as long for this row as for two."""
    return x.shape[:-1] == (1,) and x.dtype == jnp.bfloat16 and backend() == "cpu"


def _times_transposed(
    x: Float[Array, "... m n"], w: Float[Array, "... k n"], dtype: Any = None
) -> Float[Array, "... m k"]:
    batch, last = tuple(range(x.ndim - 2)), (x.ndim - 1,)
    dims = (last, last), (batch, batch)
    return jax.lax.dot_general(x, w, dims, preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(
    x: Float[Array, "... m k"], w: Float[Array, "... k n"], dtype: Any = None
) -> Float[Array, "... m n"]:
    """Computes `x @ w` for operands of one dtype and equal leading axes (none, one or several);
    `dtype` is the result's, None: the operands'.
    """
    if native.projects(x, w):
        return native.project(x, w[None], jnp.int32(0)).astype(dtype or w.dtype)
    if _is_slow_alone(x):
        return jnp.matmul(jnp.concatenate([x, x]), w, preferred_element_type=dtype)[:1]
    return jnp.matmul(x, w, preferred_element_type=dtype)


def _forward(x, w, dtype):
    return matmul(x, w, dtype), (x, w)


def _backward(dtype, saved, grad):
    x, w = saved
    grad = jax.lax.optimization_barrier(grad.astype(x.dtype))
    return _times_transposed(grad, w), jnp.matmul(_transposed(x), grad)


matmul.defvjp(_forward, _backward)


def linear(
    x: Float[Array, "*n T k"],
    weights: Float[Array, "*n k columns"] | LayerOf,
    dtype: Any = None,
) -> Float[Array, "*n T columns"]:
    """Computes `x @ weights` in the weights' dtype, which the rows may be wider than (in training);
    `dtype` is the result's, None: the weights'.
    """
    x = x.astype(weights.dtype)
    return weights.product(x, dtype) if isinstance(weights, LayerOf) else matmul(x, weights, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_transposed(
    x: Float[Array, "m k"], w: Float[Array, "n k"], dtype: Any = None
) -> Float[Array, "m n"]:
    """Computes `x @ w.T`, otherwise as `matmul`."""
    if _is_slow_alone(x):
        return _times_transposed(jnp.concatenate([x, x]), w, dtype)[:1]
    return _times_transposed(x, w, dtype)


def _forward_of_transposed(x, w, dtype):
    return matmul_transposed(x, w, dtype), (x, w)


def _backward_of_transposed(dtype, saved, grad):
    x, w = saved
    grad = jax.lax.optimization_barrier(grad.astype(x.dtype))
    return jnp.matmul(grad, w), jnp.matmul(_transposed(grad), x)


matmul_transposed.defvjp(_forward_of_transposed, _backward_of_transposed)
