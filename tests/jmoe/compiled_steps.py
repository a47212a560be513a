"""Step programs of published models, compiled for an H200 that is not there."""

import json
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import yaml
from sm90 import ptxas, sass

from jmoe.attention import page_windows, with_kv_cache_dtype
from jmoe.checkpoint import empty_pool
from jmoe.config import ModelConfig, from_hf
from jmoe.experts import make_table
from jmoe.random_model import random_params
from jmoe.steps import make_state, served
from jmoe.weights import Weights
from pallas_kernels.backend import traced_for
from tests.compile_for import compile_for, h200_mesh
from tests.compiled import large_results

BATCH, PAGES, PAGE_SIZE, MAX_BLOCKS = 64, 2048, 64, 64
MIB = 2**20
# Sampling sorts 64 rows of logits, 37 MiB each time they are written; cuBLAS takes 32. One layer's
# experts are 1,031 MiB at the least.
TEMPORARY = 256 * MIB
LARGE = 100 * MIB  # above all that a step computes, below one layer's experts or pages
BF16 = jnp.dtype(jnp.bfloat16)


class Case(NamedTuple):
    """A published model, and how many united experts a layer has beside its own.

    `launches` is what a decode and a prefill step start: kernels, library calls and copies; and
    what a layer does where a decode step scans them. When one is saved, lower the figure.
    """

    name: str
    united: int
    launches: tuple[int, int, int]
    depth: int | None = None  # layers; None: all
    changes: Mapping[str, Any] | None = None  # of its configuration
    max_blocks: int = MAX_BLOCKS
    quantize: str = "none"  # as of `jmoe.load`
    kv_cache_dtype: str = "auto"  # likewise

    @property
    def config(self) -> ModelConfig:
        """Its geometry, as Hugging Face has it."""
        root = Path(__file__).parents[2]
        if (published := root / "tests" / "published_configs" / f"{self.name}.json").exists():
            fields = json.loads(published.read_text())
        else:
            path = root / "configs" / "models" / f"{self.name}.yaml"
            fields = yaml.safe_load(path.read_text())
        depth = {} if self.depth is None else {"num_hidden_layers": self.depth}
        cfg = from_hf(fields | depth | dict(self.changes or {}))
        return with_kv_cache_dtype(cfg, self.kv_cache_dtype)

    @property
    def num_slots(self) -> int:
        """Slots a layer."""
        return self.config.num_experts + self.united

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return 2 * 3 * self.config.d_model * self.config.d_ff_expert


QWEN15, QWEN3, MIXTRAL = (
    Case("qwen1.5-moe-a2.7b", 30, (434, 410, 25)),
    Case("qwen3-30b-a3b", 32, (651, 604, 20)),
    Case("mixtral-8x7b", 2, (442, 410, 21)),
)


@pytest.fixture(autouse=True)
def _kernels_are_assembled_well(capfd, monkeypatch, tmp_path):
    """Checks every kernel that a test is the first to compile: registers suffice, products overlap,
    and addresses are whole.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    sass.dump_to(monkeypatch, tmp_path)
    yield
    kernels = sass.read(tmp_path)
    assert [name for name, code in kernels.items() if sass.short_addresses(code)] == []
    kernels = ptxas.parse("".join(capfd.readouterr()))
    assert [kernel for kernel in kernels if kernel.spill_bytes or kernel.serialized] == []


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip(
        "jax_plugins.xla_cuda13", reason="compiling for an H200 needs the extra: jmoe[aot]"
    )
    return h200_mesh()


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def abstract_model(case, levels=False):
    cfg = case.config
    params = jax.eval_shape(lambda: random_params(cfg, jax.random.key(0), BF16))
    pool = jax.eval_shape(
        lambda: empty_pool(cfg, cfg.num_moe_layers * case.num_slots, BF16, case.quantize)
    )
    table = jax.eval_shape(lambda: make_table(cfg.num_moe_layers, cfg.num_experts, case.united))
    table = table._replace(levels=int32(cfg.num_moe_layers, 8, 101) if levels else None)
    return Weights(params, pool, table)


def abstract_state(case, num_hidden=0):
    sizes = {"num_slots": BATCH, "num_pages": PAGES, "page_size": PAGE_SIZE}
    return jax.eval_shape(
        lambda: make_state(
            case.config, max_blocks=case.max_blocks, dtype=BF16, num_hidden=num_hidden, **sizes
        )
    )


class Program(NamedTuple):
    """A compiled step: its text, its memory, and the plan it is run by (None without a graph).

    A line of the plan that stands out runs alone.
    """

    hlo: str
    memory: Any
    plan: list[str] | None

    @property
    def mosaic_kernels(self) -> int:
        """Launches of Mosaic kernels; those of a scan's body are counted once."""
        return self.hlo.count('custom_call_target="mosaic_gpu')


def compile_step(mesh, case, step, *rows, eager=False, num_hidden=0, levels=False, **options):
    # A window that no sequence outgrows would not be compiled.
    assert max(page_windows(case.config)) < case.max_blocks * PAGE_SIZE
    weights = abstract_model(case, levels)
    with traced_for("cuda"):
        _, own = served({"segments": ()}, eager=eager)
        params = jax.eval_shape(lambda params: served(params, eager=eager)[0], weights.params)
    step = partial(step, case.config, max_active=case.config.num_experts)
    held = weights._replace(params=params), abstract_state(case, num_hidden)
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}  # protos are less than text
        exe = compile_for(mesh, step, *held, *rows, donate_argnums=1, options=own | dump | options)
        plans = [
            p.read_text() for p in Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")
        ]
    return Program(exe.as_text(), exe.memory_analysis(), plans[0].splitlines() if plans else None)


def check_copies(program, results=()):
    """Checks that nothing large is written, but for `results` of kernels."""
    memory = program.memory
    assert memory.temp_size_in_bytes < TEMPORARY
    # Pages come back in the memory they came in; logits are 37 MiB.
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < LARGE
    assert large_results(program.hlo, LARGE) == list(results)
    assert ".remat" not in program.hlo  # nothing is computed twice to save memory
    # The host would read the condition, and so wait for the device while it launches the step.
    assert " conditional(" not in program.hlo
