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
from benchmarks.gpu.step_part import (
    StepProgram,
    compiled,
    counted,
    decode_rows,
    decode_state,
    in_other_arrays,
    rulers,
)
from benchmarks.kernels.timing import Ceilings, Ruler
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
    ruler, ceilings = rulers(context)
    model = models.make(sizes)
    cfg = model.config
    home = Home(make_mesh(1), contiguous(cfg.num_moe_layers, cfg.num_experts, 1))
    spread = home.spread(model.weights)

    def run(case: Case) -> dict[str, Any]:
        clock = Ruler(ruler.warm_s, ruler.timed_s)  # reads no kernel times
        return _decode(sizes, model, home, spread, clock, ceilings, case)

    yield run


def _decode(
    sizes: Sizes,
    model: Model,
    home: Home,
    spread: Weights,
    ruler: Ruler,
    ceilings: Ceilings,
    case: Case,
) -> dict[str, Any]:
    """Times the plain step of a batch, then the same over the mesh; returns the record."""
    batch, context = case.about["batch"], case.about["context"]
    timed = []
    for weights, where in ((model.weights, None), (spread, home)):
        program = _program(sizes, model, weights, where, batch)
        timing = ruler.measure(program)
        active = float(np.sum(program.carry[1], axis=1).mean()) / program.calls
        timed.append((timing.span_us, active))
        del program
        gc.collect()
    (plain_us, active), (mesh_us, mesh_active) = timed
    read = models.decode_bytes(
        model.config, model.dtype, batch=batch, context=context, active_experts=active
    )
    floor = models.floor_us(read["total"], ceilings.copy_tb_s)
    return {
        "bytes": read,
        "figures": {
            "plain_us": plain_us,
            "mesh_us": mesh_us,
            "mesh_over_plain": mesh_us / plain_us,
            "floor_us": floor,
            "plain_over_floor": plain_us / floor,
            "mesh_over_floor": mesh_us / floor,
            "active_experts": active,
            "mesh_active_experts": mesh_active,
        },
    }


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
    call = compiled(counted(step), carry, weights, *arrays, options=options)
    return StepProgram(call, carry, in_other_arrays((weights,), arrays))
