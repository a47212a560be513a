"""Both stages' steps at published sizes, compiled for H200s that are not there."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from distilled import CONFIGS
from jax.sharding import NamedSharding, PartitionSpec

from jmoe.config import from_hf
from jmoe.random_model import random_params
from tests.compile_for import compile_for, h200_mesh
from training.distill import DistillConfig, refine
from training.distill.fit import Problem, _optimizer, _steps
from training.distill.refine import POOL_SPECS, UNITED_SPECS, Frozen
from training.distill.stream import LayerRows

pytestmark = pytest.mark.deep

GIB = 2**30
CONFIG = DistillConfig()


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def abstract_step(cfg, way):
    """Returns what `_steps` takes for one layer: parameters, optimizer state, captured rows,
    scalars.
    """
    d, f, m, k = cfg.d_model, cfg.d_ff_expert, cfg.num_experts, cfg.experts_per_token
    united, n = -(-m // way), CONFIG.rows
    params = {
        "gate_up": shape(jnp.float32, united, d, 2 * f),
        "down": shape(jnp.float32, united, f, d),
    }
    state = jax.eval_shape(_optimizer(CONFIG, d).init, params)
    rows = LayerRows(
        shape(jnp.bfloat16, n, d),
        shape(jnp.int32, n, k),
        shape(jnp.float32, n, k),
        shape(jnp.float32, n, k, d),
    )
    problem = Problem(rows, shape(jnp.int32, m), {}, shape(jnp.float32, united, m))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return params, state, problem, shape(jnp.int32), key


@pytest.mark.sized(exhaustive=("qwen1.5-moe-a2.7b-2-8", "qwen1.5-moe-a2.7b-8-5"))
@pytest.mark.parametrize(
    ("name", "way", "limit_gib"),
    [("qwen1.5-moe-a2.7b", 2, 8), ("qwen1.5-moe-a2.7b", 8, 5), ("mixtral-8x7b", 2, 18)],
)
def test_a_layer_fits_one_gpu_many_times_over(name, way, limit_gib):
    pytest.importorskip(
        "jax_plugins.xla_cuda13", reason="compiling for an H200 needs the extra: jmoe[aot]"
    )
    cfg, mesh = (
        from_hf(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())),
        h200_mesh(1, "data"),
    )
    step = partial(_steps, config=CONFIG, activation=cfg.activation, mesh=mesh, count=1)
    args = abstract_step(cfg, way)
    memory = compile_for(mesh, step, *args, donate_argnums=(0, 1)).memory_analysis()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    print(
        f"{name} way {way}: {total / GIB:.1f} GiB, {memory.temp_size_in_bytes / GIB:.1f} temporary"
    )
    assert total < limit_gib * GIB
    weights = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(args[0])) * 4
    assert memory.argument_size_in_bytes > 3 * weights  # parameters and both moments


def abstract_refinement(cfg, way, mesh):
    """Returns what the end-to-end stage's `_step` takes, spread over the mesh as there."""
    m, layers, d, f = cfg.num_experts, cfg.num_moe_layers, cfg.d_model, cfg.d_ff_expert
    united, rows = -(-m // way), (CONFIG.refine_rows, CONFIG.length)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def spread(spec, dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    frozen = Frozen(
        jax.eval_shape(partial(random_params, cfg, dtype=jnp.dtype("bfloat16")), key),
        {
            "gate_up": spread(POOL_SPECS["gate_up"], jnp.bfloat16, layers * m, d, 2 * f),
            "down": spread(POOL_SPECS["down"], jnp.bfloat16, layers * m, f, d),
        },
        shape(jnp.int32, layers, m),
        shape(jnp.int32, layers, m),
    )
    experts = {
        "gate_up": spread(UNITED_SPECS["gate_up"], jnp.float32, layers, united, d, 2 * f),
        "down": spread(UNITED_SPECS["down"], jnp.float32, layers, united, f, d),
    }
    state = jax.eval_shape(refine._optimizer(CONFIG, d).init, experts)
    state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        state,
        refine._placed(state, mesh),
    )
    split = PartitionSpec("data")
    arrays = (
        *(spread(split, jnp.int32, *rows) for _ in range(3)),
        spread(split, jnp.float32, *rows),
    )
    return experts, state, frozen, arrays, key


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "way", "num_gpus", "limit_gib"),
    [
        ("qwen1.5-moe-a2.7b", 2, 1, 130),
        ("mixtral-8x7b", 4, 4, 100),
    ],
)
def test_the_end_to_end_stage_fits(name, way, num_gpus, limit_gib):
    pytest.importorskip(
        "jax_plugins.xla_cuda13", reason="compiling for an H200 needs the extra: jmoe[aot]"
    )
    cfg = from_hf(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))
    mesh = h200_mesh(num_gpus, "data")
    step = partial(refine._step, cfg, config=CONFIG, mesh=mesh)
    args = abstract_refinement(cfg, way, mesh)
    memory = compile_for(mesh, step, *args, donate_argnums=(0, 1)).memory_analysis()
    united = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(args[0])) * 4 / num_gpus
    assert memory.alias_size_in_bytes > 3 * united  # parameters and moments stay where they are
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    print(
        f"{name} way {way}, end to end on {num_gpus}: {total / GIB:.1f} GiB each, "
        f"{memory.temp_size_in_bytes / GIB:.1f} temporary"
    )
    assert total < limit_gib * GIB
