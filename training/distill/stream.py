"""A model's layers in turn over packed rows: what enters each layer's experts and what comes out.

Only one layer's weights are on the device. Between layers the residual stream of all rows lies in
host memory, and in a file, so that an interrupted run goes on from the layer it was in.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jmoe.attention import AttentionKind
from jmoe.config import ModelConfig
from jmoe.experts import ExpertPool
from pallas_kernels import routing
from pallas_kernels.activation import SILU, Activation
from training.network import layer_forward, of_kind
from training.packing import Batch


class LayerRows(NamedTuple):
    """N rows of one MoE layer: its experts' inputs, the router's choice, each expert's answer. On
    the host where they are captured, on devices where they are trained on.
    """

    h: Float[Any, "N d"]
    ids: Int[Any, "N K"]
    weights: Float[Any, "N K"]
    outputs: Float[Any, "N K d"]


def layers_dtype(dtype: str = "bfloat16", platform: str | None = None) -> str:
    """Returns the dtype to capture in: a CPU's reference of the grouped GEMM is fast in float32, a
    GPU's kernel in `dtype`. `platform` None: of this machine.
    """
    return "float32" if (platform or jax.default_backend()) == "cpu" else dtype


def each_visit(
    h: Float[Array, "T d"],
    ids: Int[Array, "T K"],
    experts: ExpertPool,
    activation: Activation = SILU,
) -> Float[Array, "T K d"]:
    """Returns the output of each visit's expert, float32: the grouped GEMM with a row for each
    visit.
    """
    (num_rows, top_k), num_experts = ids.shape, experts.num_slots
    work = routing.dispatch(
        ids.reshape(-1, 1),
        jnp.ones((num_rows * top_k, 1), jnp.float32),
        jnp.arange(num_experts, dtype=jnp.int32),
        block_m=experts.block_rows(ids.size, num_experts),
        max_active=num_experts,
    )
    return experts.mlp(jnp.repeat(h, top_k, axis=0), work, activation).reshape(num_rows, top_k, -1)


@partial(jax.jit, static_argnums=(0, 1))
def _advance(
    cfg: ModelConfig,
    kind: AttentionKind,
    layer: Any,
    experts: ExpertPool | None,
    x: Float[Array, "B S d"],
    positions: Int[Array, "B S"],
    items: Int[Array, "B S"],
) -> tuple[Float[Array, "B S d"], tuple[Array, ...]]:
    def routed(h: Array, weights: Array, ids: Array) -> tuple[Array, tuple[Array, ...]]:
        assert experts is not None
        outputs = each_visit(h, ids, experts, cfg.activation)
        return jnp.einsum("tk,tkd->td", weights, outputs), (h, ids, weights, outputs)

    rows, dtype = x.reshape(-1, cfg.d_model), layer["wo"].dtype
    own = of_kind(cfg, kind, positions, items)
    rows, routing_of = layer_forward(cfg, layer, rows, *own, routed, dtype=dtype)
    return rows.reshape(x.shape), () if routing_of is None else routing_of.aux


def before_layers(cfg: ModelConfig, top: Any, data: Batch) -> Float[np.ndarray, "R S d"]:
    """Returns the residual stream before the first layer, float32; `top` has the embeddings."""
    rows = np.asarray(top["embed"], np.float32)[data.tokens]
    return rows * np.float32(cfg.embedding_multiplier)


def run_layer(
    cfg: ModelConfig,
    index: int,
    layer: Any,
    experts: ExpertPool | None,
    x: Float[np.ndarray, "R S d"],
    data: Batch,
    *,
    batch: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LayerRows | None:
    """Takes the residual stream `x` through layer `index`, in place; returns an MoE layer's rows.

    `batch` packed rows go at a time; the last batch is filled up, so that one program serves all.
    """
    num_rows = len(x)
    parts: list[tuple[np.ndarray, ...]] = []
    for start in range(0, num_rows, batch):
        stop = min(start + batch, num_rows)
        rows = np.minimum(np.arange(start, start + batch), num_rows - 1)
        arrays = (x[rows], data.positions[rows], data.items[rows])
        own = cfg, cfg.layer_attention[index], layer, experts
        new, captured = _advance(*own, *map(jnp.asarray, arrays))
        x[start:stop] = np.asarray(new)[: stop - start]
        if captured:
            tokens = np.flatnonzero(data.items[start:stop])  # the filling comes last
            parts.append(tuple(np.asarray(a)[tokens] for a in captured))
        progress(stop, num_rows)
    return LayerRows(*map(np.concatenate, zip(*parts, strict=True))) if parts else None
