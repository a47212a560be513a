"""Steps compiled for GPUs without the Mosaic kernels: few launches, one graph, no large copies.

Two models, of two layers and of three: the difference is a layer.
"""

import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml

from jmoe.attention import with_kv_cache_dtype
from jmoe.checkpoint import empty_pool
from jmoe.config import from_hf
from jmoe.experts import make_table
from jmoe.packed_rows import NUM_COLUMNS
from jmoe.random_model import random_params
from jmoe.steps import decode_step, make_state, prefill_step, served
from jmoe.weights import Weights
from pallas_kernels.backend import batched_only, traced_for
from tests.compile_for import OTHER_GPUS, compile_for, gpu_mesh
from tests.compiled import count_launches, large_results

pytestmark = pytest.mark.deep

BF16 = jnp.dtype(jnp.bfloat16)
MODELS = Path(__file__).parents[2] / "configs" / "models"
UNITED = {"qwen1.5-moe-a2.7b": 30, "qwen3-30b-a3b": 32, "mixtral-8x7b": 2}
PIECES = 2**31  # of the batched grouped GEMM and attention


DECODE = [
    ("qwen1.5-moe-a2.7b", 8, 27),
    ("qwen1.5-moe-a2.7b", 104, 34),
    ("qwen3-30b-a3b", 8, 35),
    ("mixtral-8x7b", 8, 25),
]
PREFILL = [
    ("qwen1.5-moe-a2.7b", 513, 60),
    ("qwen1.5-moe-a2.7b", 4096, 62),
    ("qwen3-30b-a3b", 512, 60),
]
"""A model, rows, and the most launches."""


def all_but(*kept, of):
    """Returns marks for the cases that are not among a few: they are compiled in turn."""
    cases = {"-".join(map(str, (gpu, *case))) for gpu in OTHER_GPUS for case in of}
    return pytest.mark.sized(exhaustive=sorted(cases - set(kept)))


@pytest.fixture(params=OTHER_GPUS)
def mesh(request):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="compiling for a GPU needs jmoe[aot]")
    return gpu_mesh(request.param)


def compiled(mesh, name, phase, rows, depth, kv_cache_dtype="auto"):
    """Compiles the step of a model's first layers as a server runs it; returns it and its
    thunks.
    """
    cfg = from_hf(
        yaml.safe_load((MODELS / f"{name}.yaml").read_text()) | {"num_hidden_layers": depth}
    )
    cfg, united = with_kv_cache_dtype(cfg, kv_cache_dtype), UNITED[name]
    params = jax.eval_shape(lambda: random_params(cfg, jax.random.key(0), BF16))
    pool = jax.eval_shape(lambda: empty_pool(cfg, depth * (cfg.num_experts + united), BF16))
    table = jax.eval_shape(lambda: make_table(depth, cfg.num_experts, united))
    sizes = {"num_slots": max(rows, 64), "num_pages": 2048, "page_size": 64, "max_blocks": 64}
    state = jax.eval_shape(lambda: make_state(cfg, dtype=BF16, **sizes))
    step, shapes = {
        "decode": (decode_step, [(rows, NUM_COLUMNS), (8, 3), (2,)]),
        "prefill": (prefill_step, [(rows,), (8, NUM_COLUMNS), (8, 3), (2,)]),
    }[phase]
    with batched_only(), traced_for("cuda"), tempfile.TemporaryDirectory() as folder:
        params = jax.eval_shape(lambda params: served(params)[0], params)
        _, options = served({"segments": ()})
        options |= {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        arguments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
        exe = compile_for(
            mesh,
            partial(step, cfg, max_active=cfg.num_experts),
            Weights(params, pool, table),
            state,
            *arguments,
            donate_argnums=1,
            options=options,
        )
        (plan,) = Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")
        return exe, plan.read_text().splitlines()


def check(mesh, name, phase, rows, most, temporary):
    """Checks that a layer has at most `most` launches, in one graph and without a loop; returns the
    program.
    """
    launches = {}
    for depth in (2, 3):
        exe, plan = compiled(mesh, name, phase, rows, depth)
        hlo, memory = exe.as_text(), exe.memory_analysis()
        launches[depth] = sum(count_launches(hlo).values())
        assert " while(" not in hlo
        assert " conditional(" not in hlo
        assert [line[:19] for line in plan if not line.startswith(" ")] == ["000: kCommandBuffer"]
    assert memory.temp_size_in_bytes < temporary
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2 * temporary
    assert launches[3] - launches[2] <= most
    return hlo


@pytest.mark.parametrize("mesh", ["sm_80"], indirect=True)
def test_a_decode_step_copies_no_pages_in_eight_bits(mesh):
    exe, plan = compiled(mesh, "qwen3-30b-a3b", "decode", 64, 2, "fp8")
    assert [line[:19] for line in plan if not line.startswith(" ")] == ["000: kCommandBuffer"]
    assert exe.memory_analysis().temp_size_in_bytes < 2**26
    assert not [result for result in large_results(exe.as_text(), 2**26) if "[2,2049," in result]


@pytest.mark.sized(exhaustive=("sm_100-mixtral-8x7b-8-25",))
@all_but("sm_100-mixtral-8x7b-8-25", of=DECODE)
@pytest.mark.parametrize(("name", "rows", "most"), DECODE)
def test_a_decode_step_is_one_graph_and_copies_neither_experts_nor_pages(mesh, name, rows, most):
    hlo = check(mesh, name, "decode", rows, most, 256 * 2**20)
    assert large_results(hlo, 128 * 2**20) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "rows", "most"), PREFILL)
def test_a_prefill_step_copies_no_more_than_pieces(mesh, name, rows, most):
    hlo = check(mesh, name, "prefill", rows, most, PIECES)
    cfg = from_hf(yaml.safe_load((MODELS / f"{name}.yaml").read_text()))
    layer = (cfg.num_experts + UNITED[name]) * cfg.d_model * 2 * cfg.d_ff_expert * 2
    assert large_results(hlo, layer) == []
