"""Tiles: the one a kernel chooses for a case, those worth trying, and a search among them.

A search goes through the fields of a tile in turn and keeps the best value of each before it goes
on to the next: a few dozen compilations, where all combinations would be thousands.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import jax.numpy as jnp

from benchmarks.kernels.cases import WEIGHT_BYTES, Case, Sizes, weight_bits
from benchmarks.kernels.roofline.assumptions import NUM_SMS
from pallas_kernels.grouped_gemm import tiles
from pallas_kernels.paged_attention import tiles as paged_tiles
from pallas_kernels.prefill_attention import tiles as prefill_tiles

AXES: dict[str, dict[str, Sequence[Any]]] = {
    "grouped_gemm": {
        "": (*(tiles.decode(w, c) for w in (8, 16, 32, 64, 128) for c in (1, 2)), tiles.prefill()),
        "group": (1, 4, 8, 16, 64),
        "cluster": (1, 2),
        "gate_up.stages": (3, 4, 5, 6, 8, 10, 12),
        "gate_up.lead": (0, 1, 2, 4),
        "down.parts": (1, 2, 4),
        "down.block_k": (64, 128),
        "down.stages": (3, 4, 5, 6, 8, 10, 12),
        "down.lead": (0, 1, 2, 4),
        "visit_dtype": (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)),
    },
    "paged_attention": {
        "tokens": (64, 128, 256),
        "blocks_per_sm": (1, 2, 3, 4),
        "min_tiles": (1, 2, 4, 8, 16),
        "merge_width": (8, 16, 32),
    },
    "prefill_attention": {
        "block_kv": (64, 128, 192),
        "key_stages": (2, 3, 4),
        "value_stages": (2, 3, 4),
        "pack": (1, 2, 4, 8),
    },
}
"""Fields of each op's Tile ("a.b" is field b of its field a; "" is all of it) and values to try."""


def chosen(case: Case) -> Any:
    """Returns the tile that the op's kernel takes by itself; None for an op without tiles."""
    shape = case.shape
    if case.op.startswith("grouped_gemm"):
        sizes = shape.num_experts, shape.d_model, shape.d_ff
        bits = weight_bits(WEIGHT_BYTES[case.op])
        return tiles.choose(case.tokens, shape.top_k, *sizes, bits)
    if case.op in AXES and shape.latent and case.context:  # not searched
        if case.phase == "prefill":
            return prefill_tiles.choose_expanded(case.tokens, shape.heads, NUM_SMS)
        return paged_tiles.choose_latent(Sizes().page_size)
    if case.op == "paged_attention":
        return paged_tiles.choose(shape.head_dim, Sizes().page_size)
    if case.op == "prefill_attention":
        return prefill_tiles.choose(shape.heads // shape.kv_heads, shape.head_dim, case.window)
    return None


def kernel(case: Case) -> Callable[..., Any]:
    """Returns the op's Mosaic kernel, which takes a `tile`."""
    module = import_module(f"pallas_kernels.{case.op}.mosaic")
    return getattr(module, "moe_mlp" if case.op == "grouped_gemm" else case.op)


def replaced(tile: Any, field: str, value: Any) -> Any:
    """Returns `tile` with another value in `field`, which may be "a.b", or "" for all of it."""
    if not field:
        return value
    head, _, rest = field.partition(".")
    if rest:
        value = replaced(getattr(tile, head), rest, value)
    return dataclasses.replace(tile, **{head: value})


def search(
    start: Any, axes: dict[str, Sequence[Any]], cost: Callable[[Any], float]
) -> Iterator[tuple[Any, float]]:
    """Yields (tile, cost) of every tile that is tried, `start` first; none is tried twice.

    A cost is microseconds, or infinity for a tile that cannot be had.
    """
    best, best_cost = start, cost(start)
    seen = {start}
    yield start, best_cost
    for field, values in axes.items():
        center = best
        for value in values:
            tile = replaced(center, field, value)
            if tile in seen:
                continue
            seen.add(tile)
            value_cost = cost(tile)
            yield tile, value_cost
            if value_cost < best_cost:
                best, best_cost = tile, value_cost
