"""Step programs over eight H200s that are not there, read as XLA schedules them.

Qwen3-235B-A22B's geometry with fewer layers: of the three that copy experts, the middle one takes
copies and sends some. docs/expert-parallelism.md has what is found here in figures.
"""

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import yaml
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmoe.checkpoint import empty_pool
from jmoe.config import from_hf
from jmoe.experts import ExpertPool, ExpertTable
from jmoe.mixed import MixedWeights, mixed_decode_step
from jmoe.packed_rows import NUM_COLUMNS
from jmoe.parallel import cost, delivery
from jmoe.parallel.experts import AXIS
from jmoe.parallel.replicas import Replication
from jmoe.parallel.steps import STEPS, mixed, spread
from jmoe.random_model import random_params
from jmoe.steps import decode_step, make_state, prefill_step, served
from jmoe.weights import Weights
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.backend import traced_for
from tests.compile_for import compile_for, h200_mesh
from tests.compiled import count_launches, large_results
from tests.equal_kernels import equal_kernels_are_compiled_once

pytestmark = pytest.mark.deep

__all__ = ["equal_kernels_are_compiled_once"]

DEVICES = 8
BATCH, TOKENS = 32, 2048  # of each device: rows of a decode step, tokens of a prefill step
SLOTS, PAGES, PAGE_SIZE, MAX_BLOCKS, CHUNKS = 64, 1024, 64, 64, 8
REPLICATION = Replication(8, 2)
BF16 = jnp.dtype(jnp.bfloat16)
LARGE = 100 * 2**20  # below the experts of a layer, whichever half of them
GIB = 2**30
SMALL = 4 * 2**20  # a collective that nothing has to hide: choices, not rows


def config_of(num_layers):
    path = Path(__file__).parents[3] / "configs" / "models" / "qwen3-235b-a22b.yaml"
    return from_hf({**yaml.safe_load(path.read_text()), "num_hidden_layers": num_layers})


CONFIG = config_of(1)
OWN_VISITS = TOKENS * CONFIG.experts_per_token
PASS_VISITS = cost.OVER * OWN_VISITS
PADDED = 16 * 8 + 256  # gaps behind 16 experts, and a tile that may begin in the last rows
WEIGHTS = {
    f"{CONFIG.d_model},{2 * CONFIG.d_ff_expert}]",
    f"{CONFIG.d_ff_expert},{CONFIG.d_model}]",
    f"{PAGE_SIZE},{CONFIG.head_dim}]",
}
"""How the shapes of experts and of KV pages end."""


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip(
        "jax_plugins.xla_cuda13", reason="compiling for an H200 needs the extra: jmoe[aot]"
    )
    return h200_mesh(DEVICES)


def shape(dims, dtype=jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(dims, dtype)


def lies(mesh, spec, tree, *, own=False):
    """The tree's leaves as global arrays; `own`: their shapes are what each device has."""

    def leaf(spec, leaf):
        times = [DEVICES if own and axis else 1 for axis in spec] + [1] * len(leaf.shape)
        dims = tuple(n * m for n, m in zip(leaf.shape, times, strict=False))
        return jax.ShapeDtypeStruct(dims, leaf.dtype, sharding=NamedSharding(mesh, spec))

    is_spec = {"is_leaf": lambda node: isinstance(node, P)}
    return jax.tree.map(lambda s, part: jax.tree.map(partial(leaf, s), part), spec, tree, **is_spec)


class Instruction(NamedTuple):
    """One of the entry computation, in the order in which they start."""

    name: str
    opcode: str
    result: str
    line: str


def sorted_rows(instructions: list[Instruction]) -> list[int]:
    """Of each grouped GEMM among them."""
    products = [one for one in instructions if "mosaic_gpu" in one.line and "gemm" in one.line]
    return [int(one.result.split("[")[1].split(",")[0]) for one in products]


class Program(NamedTuple):
    """A compiled step: its text and its memory on one device."""

    hlo: str
    memory: Any

    @classmethod
    def of(cls, exe) -> "Program":
        return cls(exe.as_text(), exe.memory_analysis())

    @property
    def schedule(self) -> list[Instruction]:
        """Of the entry computation."""
        found = re.search(r"^ENTRY .*?^\}", self.hlo, re.MULTILINE | re.DOTALL)
        assert found
        pattern = r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\(.*$"
        parts = re.finditer(pattern, found[0], re.MULTILINE)
        return [Instruction(p[1], p[3], p[2], p[0]) for p in parts]

    def under(self, opcode: str) -> list[list[Instruction]]:
        """What runs while each collective of a kind is under way, in their order."""
        schedule, found = self.schedule, []
        for start, one in enumerate(schedule):
            if one.opcode == f"{opcode}-start":
                ends = rf"{opcode}-done\(.*?%?{re.escape(one.name)}[,)]"
                done = next(i for i, other in enumerate(schedule) if re.search(ends, other.line))
                found.append(schedule[start + 1 : done])
        return found

    def synchronous(self) -> Counter[str]:
        """Large collectives that nothing hides, by opcode."""
        kinds = {"all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective-permute"}
        return Counter(
            one.opcode
            for one in self.schedule
            if one.opcode.removesuffix("-start") in kinds
            and (one.opcode in kinds or '"is_sync":true' in one.line)
            and large_results(f"ENTRY %e () {{\n{one.line}", SMALL)
        )

    def copied(self) -> Counter[str]:
        """Instructions that write arrays shaped like experts or KV pages."""
        large = large_results(self.hlo, LARGE)
        return Counter(one.split()[0] for one in large if any(end in one for end in WEIGHTS))


def compile_step(mesh, phase, num_layers, replication=None, models=1):
    cfg = config_of(num_layers)
    with traced_for("cuda"):
        params = jax.eval_shape(lambda: served(random_params(cfg, jax.random.key(0), BF16))[0])
        options = served({"segments": ()})[1]
    experts = (num_layers, cfg.num_experts)
    table = ExpertTable(
        shape((DEVICES, *experts)), shape(experts), shape((*experts, DEVICES), bool)
    )
    pool = jax.eval_shape(lambda: empty_pool(cfg, num_layers * cfg.num_experts, BF16))
    sizes = {"num_slots": SLOTS, "num_pages": PAGES, "page_size": PAGE_SIZE}
    state = jax.eval_shape(lambda: make_state(cfg, max_blocks=MAX_BLOCKS, dtype=BF16, **sizes))
    specs, deltas, control = STEPS[phase], shape((8, 3)), shape((2,))
    weights: Any = Weights(params, pool, table)
    if models > 1:
        specs = mixed(models)
        weights = MixedWeights(pool, (params,) * models, (table,) * models)
        step, rows = partial(mixed_decode_step, cfg), (shape((BATCH, NUM_COLUMNS)),)
    elif phase == "decode":
        step, rows = partial(decode_step, cfg), (shape((BATCH, NUM_COLUMNS)),)
    else:
        step = partial(prefill_step, cfg, replication=replication)
        rows = shape((TOKENS,)), shape((CHUNKS, NUM_COLUMNS))
    of_each = (state, *rows, deltas)
    where = specs.arguments[: len(of_each) + 2]
    exe = compile_for(
        mesh,
        spread(mesh, partial(step, max_active=models * cfg.num_experts), specs),
        lies(mesh, where[0], weights),
        *lies(mesh, where[1:-1], of_each, own=True),
        control,
        donate_argnums=1,
        options=options,
    )
    return Program.of(exe)


def check_memory(program, most):
    memory = program.memory
    assert memory.temp_size_in_bytes < most
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < LARGE
    assert ".remat" not in program.hlo
    assert " conditional(" not in program.hlo


@pytest.mark.sized(exhaustive=("prefill-205",))
@pytest.mark.parametrize(("phase", "launches"), [("decode", 155), ("prefill", 205)])
def test_a_step_copies_nothing_and_exchanges_rows_once_each_way(mesh, phase, launches, monkeypatch):
    """As many layers as where experts are copied, whose kernels are these in part. Rows over the
    bound have a loop a layer in prefill, whose body is no launch here; they travel at once.
    """
    if phase == "prefill":
        monkeypatch.setattr(delivery, "exchange_of", lambda *_: "all-gather")
    program = compile_step(mesh, phase, 3)
    check_memory(program, 0.05 * GIB if phase == "decode" else 0.7 * GIB)
    assert program.copied() == {}
    # Nothing there to be done meanwhile: routers come before, all products between.
    counts = count_launches(program.hlo)
    assert {kind: counts[kind] for kind in ("all-gather", "reduce-scatter")} == {
        "all-gather": 3,
        "reduce-scatter": 3,
    }
    assert not [kind for kind in counts if kind.endswith("-start")]
    loops = {} if phase == "decode" else {"while": 3}
    assert {kind: counts[kind] for kind in counts if kind == "while"} == loops
    assert program.hlo.count(" while(") == len(loops) * 3
    assert sum(counts.values()) <= launches
    if loops:
        rows = sorted_rows(program.schedule)
        assert len(rows) == 6
        assert all(PASS_VISITS < each <= PASS_VISITS + PADDED for each in rows)


@pytest.mark.exhaustive
def test_halves_travel_under_visits_of_the_other_half(mesh):
    """A prefill step's, as the cost model takes it: the second half's rows come under the first
    half's products and further passes, whose sums leave under those of the second.
    """
    program = compile_step(mesh, "prefill", 2)
    check_memory(program, 0.45 * GIB)
    assert program.copied() == {}
    counts = count_launches(program.hlo)
    for kind in ("all-gather", "reduce-scatter"):
        assert (counts[kind], counts[f"{kind}-start"]) == (2, 2)
        under = program.under(kind)
        assert [len(sorted_rows(each)) for each in under] == [2, 2]
        assert [sum(one.opcode == "while" for one in each) for each in under] == [1, 1]
    assert program.synchronous() == {"all-gather": 2, "reduce-scatter": 2}
    rows = sorted_rows(program.schedule)
    assert len(rows) == 8
    assert all(PASS_VISITS < 2 * each <= PASS_VISITS + 2 * PADDED for each in rows)
    assert sum(counts.values()) <= 190


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("way", "hops", "launches"),
    [(cost.Delivery(1300), 1, 205), (cost.Delivery(2048, 4, 2600), 2, 228)],
)
def test_rows_are_delivered_without_copies(mesh, monkeypatch, way, hops, launches):
    """Numbers of all rows travel to all; rows by an all-to-all a hop, there and back. Blocks and
    passes are loops, the latter in the former's body, too.
    """
    monkeypatch.setattr(delivery, "exchange_of", lambda *_: way)
    program = compile_step(mesh, "prefill", 2)
    check_memory(program, 0.7 * GIB)
    assert program.copied() == {}
    counts = count_launches(program.hlo)
    sent = counts["all-to-all"] + counts["all-to-all-start"]
    assert (counts["all-gather"], sent, "reduce-scatter" in counts) == (2, 2 * hops * 2, False)
    assert (counts["while"], program.hlo.count(" while(")) == (4, 6)
    assert sum(counts.values()) <= launches


@pytest.mark.exhaustive
def test_a_mixed_step_copies_nothing_and_exchanges_the_rows_of_all_models_once(mesh):
    program = compile_step(mesh, "decode", 2, models=2)
    check_memory(program, 0.05 * GIB)
    assert program.copied() == {}
    counts = count_launches(program.hlo)
    assert {kind: counts[kind] for kind in ("all-gather", "reduce-scatter")} == {
        "all-gather": 2,
        "reduce-scatter": 2,
    }
    assert " while(" not in program.hlo
    assert sum(counts.values()) <= 141  # one puts rows by column together, of all layers


class TestCopiesOfExperts:
    """Three layers; the first takes none and the last sends none."""

    @pytest.fixture(scope="class")
    def program(self, mesh):
        return compile_step(mesh, "prefill", 3, REPLICATION)

    @pytest.mark.exhaustive
    def test_only_what_is_sent_is_written(self, program):
        """What leaves is put together once, and arrives once, in both arrays of two layers."""
        check_memory(program, 2.7 * GIB)
        transfers = {"all-to-all-start": 4, "all-to-all-done": 4}
        assert program.copied() == {"fusion": 4, **transfers}

    @pytest.mark.exhaustive
    def test_rows_travel_under_visits_of_own_rows(self, program):
        under = program.under("all-gather")
        sizes = [len(sorted_rows(each)) for each in under]
        assert sizes == [2, 4, 4]  # the first layer has no copies to compute with
        assert all(OWN_VISITS < rows < PASS_VISITS for each in under for rows in sorted_rows(each))

    @pytest.mark.exhaustive
    def test_both_arrays_travel_under_visits_of_other_rows(self, program):
        """And under further passes, where there are any."""
        under = program.under("all-to-all")
        assert [len(sorted_rows(each)) for each in under] == [2, 2, 4, 4]
        assert all(rows > PASS_VISITS for each in under for rows in sorted_rows(each))
        assert [sum(one.opcode == "while" for one in each) for each in under] == [1, 1, 1, 1]

    @pytest.mark.exhaustive
    def test_only_the_sum_waits(self, program):
        """This model has no shared expert to compute while rows go home."""
        assert program.synchronous() == {"reduce-scatter": 3}

    @pytest.mark.exhaustive
    def test_launches(self, program):
        """Planning is two kernels a layer, and none of its loops is the host's: those are of
        further passes, one a layer.
        """
        counts = count_launches(program.hlo)
        assert counts["while"] == program.hlo.count(" while(") == 3
        assert sum(counts.values()) <= 361


@pytest.mark.sized(exhaustive=("True",))
@pytest.mark.parametrize("joined", [False, True])
def test_the_control_that_joins_copies_and_pool_is_caught(mesh, joined):
    """One array of both would be one grouped GEMM, and a copy of the pool in every layer."""

    def one_device(pool, copies, h, ids):
        if joined:
            both = zip(*(one.arrays.values() for one in (pool, copies)), strict=True)
            pool = ExpertPool(*map(jnp.concatenate, both))
        slots = jnp.arange(CONFIG.num_experts, dtype=jnp.int32)
        weights = jnp.ones(ids.shape, jnp.float32)
        work = routing.dispatch(ids, weights, slots, block_m=8, max_active=16)
        return grouped_gemm.moe_mlp(h, pool.gate_up, pool.down, work)

    pool = jax.eval_shape(lambda: empty_pool(CONFIG, DEVICES * 128, BF16))
    h = shape((DEVICES * BATCH, CONFIG.d_model), BF16)
    ids = shape((DEVICES * BATCH, CONFIG.experts_per_token))
    split = P(AXIS)
    run = jax.shard_map(
        one_device, mesh=mesh, in_specs=(split,) * 4, out_specs=split, check_vma=False
    )
    exe = compile_for(mesh, run, *lies(mesh, (split,) * 4, (pool, pool, h, ids)))
    assert bool(Program.of(exe).copied()) == joined
