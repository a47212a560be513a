"""Random inputs, drawn on the device where they are large."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.shapes import Shape
from pallas_kernels.grouped_gemm import four_bits, quantize

DTYPE = jnp.bfloat16
NUM_LAYERS, LAYER = 2, 1  # of the KV cache; a layer other than the first, so that its index counts


def normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    """Returns normal bfloat16 values, drawn on the device: full-size inputs are gigabytes."""
    return _normal(_key(rng), shape, scale)


def _key(rng: np.random.Generator) -> jax.Array:
    return jax.random.key(int(rng.integers(2**31)), impl="rbg")


@jax.jit(static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    return (jax.random.normal(key, shape, DTYPE) * scale).astype(DTYPE)


def pages(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    """Returns a cache [L, P, G, S, D], random in LAYER. No other may be read: it would show as
    NaN.
    """
    return _pages(_key(rng), shape)


@jax.jit(static_argnums=1)
def _pages(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    layers = jnp.full(shape, jnp.nan, DTYPE)
    return layers.at[LAYER].set(jax.random.normal(key, shape[1:], DTYPE))


class Pool:
    """Experts of several layers, so that input sets can rotate; drawn in slots, layer by layer."""

    def __init__(self, shape: Shape, rng: np.random.Generator) -> None:
        m, d, f = shape.num_experts, shape.d_model, shape.d_ff
        self.shape = shape
        self.num_layers = 4 if m * shape.expert_elements < 2**30 else 2
        self.gate_up = normal(rng, (self.num_layers * m, d, 2 * f), d**-0.5)
        self.down = normal(rng, (self.num_layers * m, f, d), f**-0.5)
        self._layers: list[tuple[jax.Array, jax.Array]] = []
        self._quantized: dict[float, tuple[Any, Any]] = {}

    def quantized(self, itemsize: float) -> tuple[Any, Any]:
        """Returns the same experts in so many bytes a weight, fp8 or int4; made a few at a time, as
        float32 takes much room.
        """
        if itemsize not in self._quantized:
            made = (_quantized(w, itemsize) for w in (self.gate_up, self.down))
            self._quantized = {itemsize: tuple(made)}
        return self._quantized[itemsize]

    def layer(self, index: int) -> tuple[jax.Array, jax.Array]:
        """Returns one layer's experts in order of slot, as libraries without a pool need them:
        copies.
        """
        m = self.shape.num_experts
        if not self._layers:
            own = [slice(i * m, (i + 1) * m) for i in range(self.num_layers)]
            self._layers = [(self.gate_up[i], self.down[i]) for i in own]
        return self._layers[index]


@partial(jax.jit, static_argnums=1)
def _quantized(weights, itemsize):
    to = quantize if itemsize == 1 else four_bits.quantize
    one = jax.lax.map(lambda w: to(w[None]), weights)
    return jax.tree.map(lambda leaf: leaf[:, 0], one)


class Pools:
    """The pool of the model that was asked for last, kept from one case to the next."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def drop(self) -> None:
        """Frees the weights."""
        self._pool = None

    def of(self, shape: Shape, rng: np.random.Generator) -> Pool:
        """Returns the pool of `shape`, drawn unless it is there."""
        if self._pool is None or self._pool.shape != shape:
            self.drop()
            self._pool = Pool(shape, rng)
        return self._pool


def choices(rng: np.random.Generator, shape: Shape, tokens: int, skew: str) -> np.ndarray:
    """Returns int32 [tokens, K] distinct experts a row.

    `uniform`: all equally likely. `exponential`: popularity falls as exp(-4 rank / m), so the most
    popular expert is about 50 times as likely as the least; which one it is, is drawn.
    """
    m = shape.num_experts
    rank = rng.permutation(m) if skew == "exponential" else np.zeros(m)
    scores = rng.gumbel(size=(tokens, m)) - 4 * rank / m  # its top K: draws without replacement
    best = np.argpartition(scores, m - shape.top_k, axis=1)[:, m - shape.top_k :]
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
    return np.take_along_axis(best, order, axis=1).astype(np.int32)
