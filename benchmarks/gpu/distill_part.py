"""Distillation of one layer at published sizes: capture of its rows and a training step, timed.

The layer's weights are random, and so are the rows that enter it; what united experts can learn of
them says nothing, and only the losses being finite and falling is checked.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.part import Case, Context, RunCase
from benchmarks.gpu.sizes import Sizes, hf_config, skew_of
from jmoe.config import ModelConfig, from_hf
from jmoe.experts import ExpertPool, groups_by_index
from jmoe.random_model import random_model
from training.distill import DistillConfig
from training.distill.fit import fit_layer
from training.distill.start import make_start
from training.distill.stream import LayerRows, run_layer
from training.packing import Batch

DEPENDS = ("pallas_kernels", "training", "jmoe/random_model.py")
START_S = 10.0


def cases(sizes: Sizes) -> list[Case]:
    """Returns a case for each model and way."""
    return [
        Case(f"{model}/way{way}", 5.0 if sizes.dry else 70.0, {"model": model, "way": way})
        for model, way in sizes.distill
    ]


@contextmanager
def session(context: Context) -> Iterator[RunCase]:
    """Yields what runs a case; the cases of one model share a layer and its captured rows."""
    captured: dict[str, tuple[ModelConfig, ExpertPool, LayerRows, float]] = {}

    def run(case: Case) -> dict[str, Any]:
        name = case.about["model"]
        if name not in captured:
            captured.clear()
            captured[name] = _capture(context.sizes, name)
        return _fit(context.sizes, case.about["way"], *captured[name])

    yield run


def _config(sizes: Sizes) -> DistillConfig:
    """Returns the default settings with only as many steps as are timed."""
    if sizes.dry:
        return DistillConfig(rows=1024, steps=40, batch=256, decode_batch=8, eval_every=20)
    return DistillConfig(steps=80, eval_every=20, patience=0)


def _capture(sizes: Sizes, name: str) -> tuple[ModelConfig, ExpertPool, LayerRows, float]:
    """Returns the rows of a first layer under random tokens, and the seconds a pass over them
    took.
    """
    config, cfg = _config(sizes), from_hf(hf_config(name, 1))
    model = random_model(cfg, sizes.seed, sizes.dtype, skew=skew_of(sizes, name))
    slots = np.asarray(model.table.slots)[0, : cfg.num_experts]
    experts = model.pool.read(slots).plain()
    layer = jax.tree.map(lambda leaf: leaf[0], model.params["segments"][0])
    shape = -(-config.rows // config.length), config.length
    tokens = np.random.default_rng(sizes.seed).integers(cfg.vocab_size, size=shape, dtype=np.int32)
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    ones = np.ones(shape, np.int32)
    batch = Batch(tokens, tokens, positions, ones, ones.astype(np.float32), ones, [])
    embedded = np.asarray(model.params["embed"], np.float32)[tokens]
    for _ in range(2):  # the second time nothing is compiled
        began = time.monotonic()
        rows = run_layer(cfg, 0, layer, experts, embedded.copy(), batch)
        seconds = time.monotonic() - began
    assert rows is not None
    return cfg, experts, rows, seconds


def _fit(
    sizes: Sizes,
    way: int,
    cfg: ModelConfig,
    experts: ExpertPool,
    rows: LayerRows,
    capture_s: float,
) -> dict[str, Any]:
    """Trains one layer's united experts and returns the record. Steps are timed from the second
    evaluation on, when everything is compiled.
    """
    config = _config(sizes)
    groups = groups_by_index(cfg.num_experts, way)
    visits = np.bincount(rows.ids.reshape(-1), minlength=cfg.num_experts)
    members = {key: np.asarray(leaf) for key, leaf in experts.arrays.items()}
    start = make_start(config.start, members, groups, visits)
    told: list[tuple[int, float]] = []
    fit = fit_layer(
        start,
        experts.arrays,
        groups,
        rows,
        jax.random.key(sizes.seed),
        config,
        lambda done, total, text: told.append((done, time.monotonic())),
    )
    (first, began), (last, ended) = told[0], told[-1]
    step_s = (ended - began) / (last - first)  # evaluations on held-out rows included
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    falling = np.isfinite(fit.error_after) and fit.error_after < fit.error_before
    return {
        "figures": {
            "capture_s": capture_s,
            "step_ms": 1e3 * step_s,
            "rows": len(rows.h),
            "layer_s": capture_s + DistillConfig().steps * step_s,
            "error_before": fit.error_before,
            "error_after": fit.error_after,
            "peak_gib": None if peak is None else peak / 2**30,
        },
        **({} if falling else {"failed": f"error {fit.error_before} -> {fit.error_after}"}),
    }
