"""One layer's training step at published sizes, compiled for an H200 that is not there."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jmoe.config import from_hf
from pallas_kernels.compile_for import compile_for, h200_mesh
from training.distill import DistillConfig
from training.distill.fit import Problem, _optimizer, _steps
from training.distill.objectives import Rows

GIB = 2**30
CONFIGS = Path(__file__).parents[2] / "configs" / "models"
CONFIG = DistillConfig()


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def abstract_step(cfg, way):
    """What `_steps` takes for one layer: parameters, optimizer state, captured rows, scalars."""
    d, f, m, k = cfg.d_model, cfg.d_ff_expert, cfg.num_experts, cfg.experts_per_token
    united, n = -(-m // way), CONFIG.rows
    params = {
        "gate_up": shape(jnp.float32, united, d, 2 * f),
        "down": shape(jnp.float32, united, f, d),
    }
    state = jax.eval_shape(_optimizer(CONFIG, d).init, params)
    rows = Rows(
        shape(jnp.bfloat16, n, d),
        shape(jnp.int32, n, k),
        shape(jnp.float32, n, k),
        shape(jnp.float32, n, k, d),
    )
    problem = Problem(rows, shape(jnp.int32, m), {}, shape(jnp.float32, united, m))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return params, state, problem, shape(jnp.int32), key


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
    step = partial(_steps, config=CONFIG, mesh=mesh, count=1)
    args = abstract_step(cfg, way)
    memory = compile_for(mesh, step, *args, donate_argnums=(0, 1)).memory_analysis()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    print(
        f"{name} way {way}: {total / GIB:.1f} GiB, {memory.temp_size_in_bytes / GIB:.1f} temporary"
    )
    assert total < limit_gib * GIB
    weights = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(args[0])) * 4
    assert memory.argument_size_in_bytes > 3 * weights  # parameters and both moments
