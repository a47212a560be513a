"""A decode step over a mesh of one device against the plain step: what expert parallelism costs
where there is nothing to exchange.

Both are the engine's own steps over the same weights, rows and pages, chained through their donated
state (see step_part); the mesh has a copy of the experts in an order of its own.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import models, step_part
from benchmarks.gpu.part import Case, Context, RunCase
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.step_part import StepProgram, counted, decode_rows, decode_state, rulers
from benchmarks.kernels.timing import Ruler
from jmoe.api import Model
from jmoe.parallel import steps as on_mesh
from jmoe.parallel.home import Home, make_mesh
from jmoe.parallel.placement import contiguous
from jmoe.steps import decode_step, served
from jmoe.weights import Weights

DEPENDS = (*step_part.DEPENDS, "benchmarks/gpu/step_part.py")
START_S = 120.0  # experts go through host memory, layer by layer, to lie on the mesh


def cases(sizes: Sizes) -> list[Case]:
    """Returns a case for each batch. At batch 1 a step is short, and fixed costs weigh most."""
    about = {"mesh": "ep=1", "context": sizes.context}
    return [Case(f"decode/b{b}", 60.0, {**about, "batch": b}) for b in sizes.mesh_batches]


@contextmanager
def session(context: Context) -> Iterator[RunCase]:
    """Makes one model, plain and spread over the mesh, and yields what runs a case."""
    sizes = context.sizes
    ruler, _ = rulers(context)
    model = models.make(sizes)
    cfg = model.config
    home = Home(make_mesh(1), contiguous(cfg.num_moe_layers, cfg.num_experts, 1))
    steps = {"plain": (model.weights, None), "mesh": (home.spread(model.weights), home)}

    def run(case: Case) -> dict[str, Any]:
        figures, clock = {}, Ruler(ruler.warm_s, ruler.timed_s)  # reads no kernel times
        for name, (weights, where) in steps.items():
            program = _program(sizes, model, weights, where, case.about["batch"])
            figures[f"{name}_us"] = clock.measure(program).span_us
            active = np.sum(program.carry[1], axis=1).mean()
            figures[f"{name}_active_experts"] = float(active) / program.calls
            del program
            gc.collect()
        return {"figures": {**figures, "mesh_over_plain": figures["mesh_us"] / figures["plain_us"]}}

    yield run


def _program(
    sizes: Sizes, model: Model, weights: Weights, home: Home | None, batch: int
) -> StepProgram:
    """Returns a decode step; over the mesh of `home`, if there is one."""
    cfg = model.config
    params, options = served(weights.params)
    weights = weights._replace(params=params)
    state = decode_state(sizes, model, sizes.mesh_batches)
    arrays = decode_rows(range(batch), sizes.context)
    step: Any = partial(decode_step, cfg, max_active=cfg.num_experts)
    if home is not None:
        step = on_mesh.spread(home.mesh, step, on_mesh.STEPS["decode"])
    carry = state, jnp.zeros((cfg.num_moe_layers, cfg.num_experts), jnp.int32)
    return StepProgram.of(counted(step), carry, (weights,), arrays, options)
