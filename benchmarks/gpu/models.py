"""Random models of a size, and what their steps cannot do without."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.sizes import Sizes, hf_config, skew_of
from jmoe.api import Model
from jmoe.attention import page_bytes
from jmoe.config import ModelConfig, from_hf
from jmoe.family import Family
from jmoe.random_model import random_family, random_model, weight_bytes
from jmoe.sharing import Sharing


def make(sizes: Sizes, *, ways: tuple[int, ...] = (), depth: int | None = None) -> Model:
    """Returns the model that is served, with random weights; `depth` cuts its layers."""
    cfg = from_hf(hf_config(sizes.model, depth))
    return random_model(cfg, sizes.seed, sizes.dtype, ways, skew_of(sizes, sizes.model))


def make_family(sizes: Sizes) -> Family:
    """Returns two models of the served geometry with random weights, over one pool.

    Of each layer's positions the second shares `family_shared_percent` with the first, drawn anew
    for every layer.
    """
    cfg = from_hf(hf_config(sizes.model))
    sharing = Sharing.none(("first", "second"), cfg.num_moe_layers, cfg.num_experts)
    rng = np.random.default_rng(sizes.seed)
    count = round(sizes.family_shared_percent * cfg.num_experts / 100)
    for layer in range(cfg.num_moe_layers):
        sharing.owners[1, layer, rng.permutation(cfg.num_experts)[:count]] = 0
    return random_family(cfg, sharing, sizes.seed, sizes.dtype, skew_of(sizes, sizes.model))


def use_compilation_cache(directory: Path) -> None:
    """Turns on XLA's own cache of compiled programs. Not for a process that serves.

    A server keeps its programs itself (`serving.execution.executables`), and not beside this cache.
    """
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def decode_bytes(
    cfg: ModelConfig, dtype: Any, *, batch: int, context: int, active_experts: float
) -> dict[str, float]:
    """Returns the bytes a decode step must read: experts that have rows, other weights, and KV.

    `active_experts` is the mean over MoE layers; every sequence has `context` positions.
    """
    expert, others = weight_bytes(cfg, dtype)
    read = {
        "experts": active_experts * cfg.num_moe_layers * expert,
        "other_weights": float(others),
        "kv": float(batch * context * sum(page_bytes(cfg, 1, jnp.dtype(dtype)))),
    }
    return {**read, "total": sum(read.values())}


def prefill_flops(cfg: ModelConfig, chunks: list[tuple[int, int]]) -> int:
    """Returns the floating-point operations of a prefill step without brownout; chunks are (rows,
    positions).

    Products of every row with the weights it visits, causal attention, and the output projection of
    each chunk's last row.
    """
    d, width = cfg.d_model, cfg.num_heads * cfg.head_dim
    attention = d * (width + 2 * cfg.num_kv_heads * cfg.head_dim) + width * d
    d_ff, matrices = cfg.experts_per_token * cfg.d_ff_expert + cfg.d_ff_shared, cfg.up_matrices + 1
    layers = cfg.num_layers * attention
    layers += cfg.num_moe_layers * (d * cfg.num_experts + matrices * d * d_ff)
    layers += cfg.num_dense_layers * matrices * d * cfg.d_ff_dense
    rows = sum(n for n, _ in chunks)
    pairs = sum(n * (c - n) + n * (n + 1) // 2 for n, c in chunks)
    head = len(chunks) * d * cfg.vocab_size
    return 2 * (rows * layers + head) + 4 * pairs * width * cfg.num_layers


def floor_us(num_bytes: float, copy_tb_s: float) -> float:
    """Returns microseconds to move bytes at the copy's rate."""
    return num_bytes / copy_tb_s / 1e6
