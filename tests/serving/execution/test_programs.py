"""Layers as a Hopper GPU's server has them, on a CPU: one after another rather than scanned."""

import asyncio
import logging
import math
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jmoe import attention, steps
from jmoe.model import unstack
from jmoe.packed_rows import KV_LEN, Q_LEN, SLOT
from pallas_kernels.backend import traced_for
from serving.config import AuditConfig, BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.execution import param_sets, runner
from serving.execution.buckets import Buckets, Key, with_default_buckets
from serving.execution.fitting import limits_of
from serving.execution.programs import Programs
from serving.plan import StepControl
from serving.request import Priority, SamplingParams

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3_moe_mixed_yarn"
PROMPT = [5, 60, 17, 33, 8, 59, 2, 44, 13, 7, 21, 3]


def config(**changes):
    given = {
        "model": str(GOLDEN),
        "dtype": "float32",
        "max_num_seqs": 2,
        "max_model_len": 32,
        "page_size": 8,
        "max_prefill_tokens": 8,
        "decode_buckets": (2,),
        "prefill_buckets": (8,),
        "threshold_buckets_percent": (100,),
        "compilation_cache": "",
        "brownout": BrownoutConfig(strategy="full", decode_threshold_percent=40, salc=False),
        **changes,
    }
    return EngineConfig(**given)


@asynccontextmanager
async def serving(**changes):
    engine = await Engine.start(config(**changes))
    try:
        yield engine
    finally:
        await engine.stop()


async def answer(engine, priority=LS, prompt=PROMPT):
    """Returns a request's tokens and degraded visits; prefill in two chunks, decode under
    brownout.
    """
    tokens, degraded = [], 0
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    async for out in engine.generate(prompt, sampling, priority=priority):
        tokens += out.token_ids
        degraded = out.usage.degraded_visits
    return tokens, degraded


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Gives layers arrays of their own, but for `eager`; returns which of both were asked for."""

    def served(params, *, eager):
        chosen.append(eager)
        return (params if eager else unstack(params)), {}

    chosen = []
    monkeypatch.setattr(param_sets, "served", served)
    return chosen


@pytest.mark.deep
async def test_layers_one_after_another_answer_as_scanned_ones(as_on_a_gpu):
    async with serving(policy="fcfs") as engine:
        tokens, degraded = await answer(engine)
    async with serving(policy="fcfs", enforce_eager=True) as engine:
        assert (tokens, degraded) == await answer(engine)
    assert as_on_a_gpu == [False, True]
    assert len(tokens) == 6
    assert degraded > 0


@pytest.mark.deep
@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["zero", "full"])
async def test_a_program_for_each_part_where_the_host_would_wait_for_a_loop(as_on_a_gpu, strategy):
    """As on a GPU: what is parked between two of them answers as what runs alone."""
    brownout = BrownoutConfig(strategy=strategy, decode_threshold_percent=0, salc=False)
    async with serving(part_layers=1, brownout=brownout, reserved_ls_seqs=1) as engine:
        alone = await answer(engine)
        parts = [key for key in engine.executor.programs.compiled() if key.stop_layer]
        assert sorted(map(layers_of, parts)) == sorted(2 * [(n, n + 1) for n in range(4)])
        given_way, urgent = [], []
        while not engine.scheduler.num_parks:
            two = [asyncio.create_task(answer(engine, BE)) for _ in range(2)]
            while not any(step.first_layer for step in engine.scheduler.under_way):
                await asyncio.sleep(0)
                if all(task.done() for task in two):
                    break
            urgent.append(await answer(engine, LS))
            given_way += await asyncio.gather(*two)
        together = [*given_way, *urgent]
        if strategy == "zero":
            assert together == [alone] * len(together)
        else:  # best effort gives way in brownout, too
            assert all(degraded <= alone[1] for _, degraded in urgent)
        assert engine.executor.compilations_since_ready == 0
        rows = engine.accounts.counters
        assert rows.degraded_visits == sum(one[1] for one in (alone, *together))


@pytest.mark.exhaustive
async def test_each_size_of_a_gpus_steps_is_cut_as_its_layers_take(as_on_a_gpu, monkeypatch):
    """A size whose layers are short runs whole, and no other for its sake."""
    times = {("decode", 1): 12.0, ("decode", 2): 40.0, ("prefill", 8): 1200.0}
    monkeypatch.setattr(
        runner.DeviceRunner, "_time", lambda self, key, *ways: [times[key.phase, key.size]]
    )
    # What the host takes counts where it is more than what the device does.
    host_s = 0.0
    monkeypatch.setattr(runner.DeviceRunner, "_host_launch_s", lambda self, key: host_s)
    monkeypatch.setattr(runner, "GPU_LAUNCH_S", 0.27)  # 3 % of three layers of the smallest
    async with serving(decode_buckets=(1, 2)) as engine:
        assert engine.executor.part_layers_by_size == {"decode 1": 4, "decode 2": 1, "prefill 8": 1}
        assert parts_of(engine) == {("decode 2", 1), ("prefill 8", 1)}
    monkeypatch.setattr(runner, "GPU_LAUNCH_S", 0.12)
    async with serving(decode_buckets=(1, 2)) as engine:
        assert engine.executor.part_layers_by_size == {"decode 1": 2, "decode 2": 1, "prefill 8": 1}
    host_s = 0.9
    async with serving(decode_buckets=(1, 2)) as engine:
        assert engine.executor.part_layers_by_size == {"decode 1": 4, "decode 2": 4, "prefill 8": 1}
        assert parts_of(engine) == {("prefill 8", 1)}


def parts_of(engine):
    """Returns the sizes that have programs for parts, and how many layers these have."""
    keys = [key for key in engine.executor.programs.compiled() if key.stop_layer]
    return {(f"{key.phase} {key.size}", key.stop_layer - key.first_layer) for key in keys}


def layers_of(key):
    return key.first_layer, key.stop_layer


@pytest.mark.exhaustive
async def test_rows_that_leave_a_step_in_parts_leave_it_to_the_programs_it_was_begun_with(
    as_on_a_gpu, monkeypatch
):
    """Of eight tokens, four are left after the first layer: by themselves too few to be cut."""
    times = {("decode", 2): 1.0, ("prefill", 4): 1.0, ("prefill", 8): 1200.0}
    monkeypatch.setattr(
        runner.DeviceRunner, "_time", lambda self, key, *ways: [times[key.phase, key.size]]
    )
    monkeypatch.setattr(runner.DeviceRunner, "_host_launch_s", lambda self, key: 1.0)
    async with serving(prefill_buckets=(4, 8), max_prefill_seqs=2) as engine:
        assert parts_of(engine) == {("prefill 8", 1)}
        alone = await answer(engine, prompt=PROMPT[:4])
        leaves, stays = (
            asyncio.create_task(answer(engine, BE, prompt=PROMPT[:4])) for _ in range(2)
        )
        while not any(step.first_layer for step in engine.scheduler.under_way):
            await asyncio.sleep(0)
        (step,) = engine.scheduler.under_way
        assert step.size == 8
        leaves.cancel()
        assert await stays == alone
        assert engine.executor.compilations_since_ready == 0


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_a_part_has_a_program_for_whatever_a_step_that_began_it_still_holds(first):
    """Sizes are cut into 1, 2 and 4 layers of 4."""
    limits = limits_of(config(), num_layers=4)
    of = Buckets(config(decode_buckets=(2, 4, 8), prefill_buckets=(2, 4, 8)), limits)
    at_once = {(first, 2): 4, (first, 4): 2, (first, 8): 1}
    parts = of.parts(at_once)
    assert [layers_of(key) for key in parts if key.size == 8] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [layers_of(key) for key in parts if key.size == 4] == [(0, 2), (2, 4)]
    assert not [key for key in parts if key.size == 2]
    for begun in parts:
        for left in (2, 4, 8):
            if left <= begun.size:
                found = of.part(Key(first, left, 100), layers_of(begun), at_once)
                assert found in parts
                assert left <= found.size <= begun.size


@pytest.mark.parametrize(
    ("launch_s", "whole_s", "layers", "found"),
    [
        (0.0, 24.0, 24, 1),
        (0.03, 24.03, 24, 1),  # a layer takes a second, a launch 3 % of it
        (0.031, 24.0, 24, 2),
        (0.15, 24.15, 24, 6),  # five would do; four parts of six are as good as 5, 5, 5, 5 and 4
        (0.39, 24.39, 24, 24),  # thirteen of 24: two parts would be too dear
        (9.0, 24.0, 24, 24),
        (1.0, 0.5, 5, 5),  # a machine that stood still meanwhile
        (0.03, 5.0, 5, 3),  # two would do, in three parts of which one has a single layer
        (0.08, 5.0, 5, 5),
    ],
)
def test_parts_are_as_short_as_a_launch_is_cheap(launch_s, whole_s, layers, found):
    assert runner.part_layers(launch_s, whole_s, layers) == found


@pytest.mark.parametrize("sizes", [(2, 8), (3, 4), (5, 32), (1, 64), (3, 512)])
def test_steps_that_are_timed_fill_their_size_and_give_no_slot_a_page_or_two_rows(sizes):
    """But no row sees more positions than a sequence may have: it has no pages for them. What they
    write: in the next test.
    """
    decode, prefill = sizes
    settings = config(max_num_seqs=decode, decode_buckets=(decode,), prefill_buckets=(prefill,))
    limits = limits_of(settings, num_layers=4)
    timed = SimpleNamespace(limits=limits, buckets=Buckets(settings, limits))
    timed._max_model_len = settings.max_model_len
    keys = [key for key in set(timed.buckets.keys()) if key.phase in ("decode", "prefill")]
    assert {key.size for key in keys} == {*sizes}
    for key in keys:
        plan = runner.DeviceRunner._full_step(timed, key, 1, 3).plan
        slots, lengths = plan.rows[:, SLOT].tolist(), plan.rows[:, Q_LEN]
        assert len(set(slots)) == len(slots)
        assert max(slots) < limits.num_slots
        most = min(key.size, len(slots) * settings.max_model_len)
        assert most - len(slots) < lengths.sum() <= most
        assert (plan.rows[:, KV_LEN] >= lengths).all()
        assert plan.rows[:, KV_LEN].max() <= settings.max_model_len
        assert len(plan.deltas) == 0


@pytest.mark.deep
async def test_steps_that_are_timed_write_no_two_rows_to_one_place(monkeypatch):
    """But in the padding page; a GPU's kernel may leave there half of each."""
    write_kv, written = attention.write_kv, []

    def watched(projection, k_pages, v_pages, *, layer, page, offset):
        jax.debug.callback(lambda *at: written.append(at), page, offset)
        places = {"layer": layer, "page": page, "offset": offset}
        return write_kv(projection, k_pages, v_pages, **places)

    monkeypatch.setattr(attention, "write_kv", watched)
    async with serving() as engine:
        assert engine.executor.part_layers_by_size.keys() == {"decode 2", "prefill 8"}
        padding = engine.executor.limits.num_pages
    jax.effects_barrier()
    assert any((np.asarray(page) != 0).any() for page, _ in written)
    for page, offset in written:
        own = [at for at in zip(page.tolist(), offset.tolist(), strict=True) if at[0] != padding]
        assert len(set(own)) == len(own)


@pytest.mark.deep
async def test_a_policy_that_never_parks_needs_no_programs_for_parts(as_on_a_gpu):
    async with serving(policy="fcfs", part_layers=1) as engine:
        assert not any(key.stop_layer for key in engine.executor.programs.compiled())
        assert engine.executor.device.state.hidden is None


def buckets(**sizes):
    config = with_default_buckets(EngineConfig(**sizes))
    return config.decode_buckets, config.prefill_buckets, config.threshold_buckets_percent


def test_a_cpu_gets_few_programs_and_a_gpu_fine_steps():
    assert buckets() == ((4, 16, 64), (32, 128, 512), (100,))
    assert buckets(mode="aep")[0] == (4, 8, 16, 64)
    assert buckets(max_num_seqs=3, max_prefill_tokens=40) == ((3,), (32, 40), (100,))
    with traced_for("cuda"):
        assert buckets() == ((8, 16, 32, 64), (32, 64, 128, 256, 512), (20, 40, 70, 100))
        assert buckets(max_num_seqs=3)[0] == (8,)  # cuBLAS takes whole eights of rows
        assert buckets(max_num_seqs=100)[0] == (8, 16, 32, 64, 104)


def test_a_cpu_gets_the_sizes_between_late_unless_sizes_are_set():
    def late(num_ranks=1, **sizes):
        config = with_default_buckets(EngineConfig(**sizes), num_ranks)
        return config.late_decode_buckets, config.late_prefill_buckets

    assert late() == ((1, 2, 8, 32, 48), (64, 256, 384))
    assert late(max_num_seqs=1, max_prefill_tokens=32) == ((), ())
    assert late(max_num_seqs=3, max_prefill_tokens=40) == ((1, 2), ())
    assert late(mode="aep") == late(num_ranks=2) == ((), ())
    assert late(decode_buckets=(64,)) == ((), (64, 256, 384))
    assert late(prefill_buckets=(512,)) == ((1, 2, 8, 32, 48), ())
    assert late(decode_buckets=(64,), late_decode_buckets=(24,))[0] == (24,)
    assert late(prefill_buckets=(512,), late_prefill_buckets=(24,))[1] == (24,)
    with traced_for("cuda"):
        assert late() == ((), ())


def test_a_step_runs_a_late_size_once_its_programs_are_there():
    of = Buckets(EngineConfig(), limits_of(EngineConfig()))
    late = {"decode": [48, 32, 8, 2, 1], "prefill": [384, 256, 64]}
    assert of.late == [(phase, size) for phase, sizes in late.items() for size in sizes]
    at_start = set(of.keys())

    def sizes(phase, most, **asked):
        keys = [
            of.choose(phase, n, 100, **{"prompt_logprobs": False, **asked})
            for n in range(1, most + 1)
        ]
        return [key.size for key in keys]

    assert set(sizes("decode", 64)) == {4, 16, 64}
    assert set(sizes("prefill", 512)) == {32, 128, 512}
    for phase, size in (("decode", 32), ("prefill", 256), ("decode", 1)):
        assert not at_start.intersection(of.late_keys(phase, size))
        of.add_late(phase, size)
    assert sizes("decode", 64) == [1, 4, 4, 4, *[16] * 12, *[32] * 16, *[64] * 32]
    assert sizes("prefill", 512) == [*[32] * 32, *[128] * 96, *[256] * 128, *[512] * 256]
    assert set(of.keys()) == at_start
    assert set(sizes("decode", 20, models=2)) == {4, 16, 64}  # of the start
    assert set(sizes("prefill", 200, prompt_logprobs=True)) == {512}  # which `score` follows


@pytest.fixture
def held(monkeypatch):
    """Holds up late programs' compilation; returns the event that lets them go, and the sizes of
    steps that run, by phase.
    """
    released, ran = threading.Event(), {"decode": [], "prefill": []}
    compile_all, run = Programs.compile_all, Programs.run

    def held_up(self, keys, executables, progress=None, *, late=False):
        if late:
            assert released.wait(60)
            if keys[-1].size == 2:
                raise RuntimeError("out of registers\nhere is why")
        compile_all(self, keys, executables, progress, late=late)

    def noted(self, key, *args, **given):
        ran[key.phase].append(key.size)
        return run(self, key, *args, **given)

    monkeypatch.setattr(runner, "LATE_AFTER_S", 0.0)
    monkeypatch.setattr(Programs, "compile_all", held_up)
    monkeypatch.setattr(Programs, "run", noted)
    return released, ran


@pytest.mark.deep
async def test_no_step_waits_for_a_late_program_or_fails_for_want_of_one(held, caplog):
    """Of three late sizes one is never there: compiling it fails."""
    released, ran = held
    decode = {"decode_buckets": (3,), "late_decode_buckets": (1, 2)}
    prefill = {"prefill_buckets": (32,), "late_prefill_buckets": (16,), "max_prefill_tokens": 32}
    no_audit = AuditConfig(share=0)
    async with serving(max_num_seqs=3, audit=no_audit, **decode, **prefill) as engine:

        def sizes_run():
            found = {phase: set(sizes) for phase, sizes in ran.items()}
            for sizes in ran.values():
                sizes.clear()
            return found

        sizes_run()
        (late,) = [t for t in threading.enumerate() if t.name == "jmoe-late"]
        before = await answer(engine)  # while the first of them is being compiled
        assert late.is_alive()
        assert sizes_run() == {"decode": {3}, "prefill": {32}}
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            released.set()
            await asyncio.to_thread(late.join)
        (line,) = [record.getMessage() for record in caplog.records]
        assert line == (
            "no program for decode steps of 2 rows, which run more: RuntimeError: out of registers"
        )
        assert await answer(engine) == before
        assert sizes_run() == {"decode": {1}, "prefill": {16}}
        assert await asyncio.gather(answer(engine), answer(engine)) == [before] * 2
        found = sizes_run()
        assert 3 in found["decode"]
        assert 2 not in found["decode"]
        assert engine.executor.compilations_since_ready == 0
        sampled = SamplingParams(max_new_tokens=3, ignore_eos=True, temperature=1.0)
        assert len([out async for out in engine.generate(PROMPT, sampled)]) == 3
        assert engine.executor.compilations_since_ready == 0


@pytest.mark.deep
async def test_a_server_that_stops_compiles_no_more(held):
    released, _ = held
    async with serving(max_num_seqs=3, decode_buckets=(3,), late_decode_buckets=(1, 2)) as engine:
        (late,) = [t for t in threading.enumerate() if t.name == "jmoe-late"]
    released.set()
    await asyncio.to_thread(late.join)
    assert {key.size for key in engine.executor.programs.compiled() if key.phase == "decode"} == {3}


def test_buckets_that_are_set_are_kept_but_for_those_that_no_step_reaches():
    sizes = {"decode_buckets": (2, 8, 32, 64), "threshold_buckets_percent": (40, 100)}
    assert buckets(max_num_seqs=20, **sizes) == ((2, 8, 32), (32, 128, 512), (40, 100))


def test_sizes_that_switch_have_programs_without_copies_of_experts_beside():
    config = EngineConfig(max_prefill_tokens=128, threshold_buckets_percent=(40, 100))
    of = Buckets(config, limits_of(config, 4))
    whole, at_once = of.keys(), {("prefill", 32): 2, ("prefill", 128): 2, ("decode", 4): 2}
    parts = of.parts(at_once)
    of.switched = frozenset({128})
    for before, found in ((whole, of.keys()), (parts, of.parts(at_once))):
        without = [key for key in found if not key.copies]
        assert [key for key in found if key.copies] == before
        assert [key._replace(copies=True) for key in without] == [
            key for key in before if (key.phase, key.size) == ("prefill", 128)
        ]
        assert len({key.name for key in found}) == len(found)


def test_every_step_has_a_program():
    config = EngineConfig(max_num_seqs=40, max_prefill_tokens=100)
    found = Buckets(config, limits_of(config))
    keys = set(found.keys())
    for logprobs in (False, True):
        for percent in (0, 40, 100):
            for tokens in (1, 31, 33, 100):
                key = found.choose("prefill", tokens, percent, prompt_logprobs=logprobs)
                assert key in keys
                assert key.size >= tokens
                assert not logprobs or Key("score", key.size, 100) in keys
            for rows in (1, 5, 40):
                key = found.choose("decode", rows, percent, prompt_logprobs=False)
                assert key in keys
                assert key.size >= rows
    rows = {found.rows(key) for key in keys if key.phase in ("prefill", "decode")}
    assert {key.size for key in keys if key.phase == "draw"} == rows


def test_what_is_served_where():
    """Options of XLA by layout: with the wrong ones a scan copies weights, or a graph breaks up."""
    params = {"segments": ()}
    assert steps.served(params) == (params, {})
    assert steps.served(params, eager=True) == (params, {})
    with traced_for("cuda"):
        _, graph = steps.served(params)
        _, eager = steps.served(params, eager=True)
        scan = steps.compiler_options()
    assert graph == scan | {"xla_gpu_enable_dynamic_slice_fusion": "False"}
    assert eager == scan | {"xla_gpu_enable_command_buffer": ""}


def test_an_exempt_row_costs_the_experts_it_pins_and_no_more():
    """Of m experts it may visit K beside those of the threshold."""
    plan = SimpleNamespace(num_exempt=0, models=(0,))
    cfg = SimpleNamespace(experts_per_token=3, num_experts=60, strategy=None)
    model = SimpleNamespace(
        config=cfg, resident=SimpleNamespace(largest_threshold=lambda strategy, level: level)
    )
    holder = SimpleNamespace(model=model, family=[model] * 3)

    def percent(num_exempt, threshold, strategy=2):
        plan.num_exempt = num_exempt
        control = StepControl(threshold, strategy)
        return runner.DeviceRunner._capacity_percent(holder, plan, control)

    assert percent(0, 20) == 20
    assert percent(1, 20) == 25
    assert percent(2, 20) == 30
    assert percent(20, 20) == 100
    assert percent(0, 20, strategy=0) == 100
    for threshold in range(0, 101, 7):
        for rows in range(25):
            bucket = percent(rows, threshold)
            touched = min(60, math.ceil(threshold * 60 / 100) + 3 * rows)
            assert math.ceil(bucket * 60 / 100) >= touched
    plan.models = (0, 2)  # of a mixed step, twice as many columns
    assert percent(2, 20) == 25
    assert percent(20, 20) == 70


def test_how_many_layers_at_once_goes_by_the_program_that_a_step_needs():
    """Of a mesh it is that of the fullest rank: `size` is its rows."""
    mesh = config(max_num_seqs=32, decode_buckets=(4, 8), mesh="ep=4")
    limits = limits_of(mesh, num_layers=4, num_ranks=4)
    holder = SimpleNamespace(
        limits=limits,
        buckets=Buckets(mesh, limits),
        _layers_at_once={("decode", 4): 2, ("decode", 8): 1},
    )
    for size, layers in ((1, 2), (4, 2), (5, 1), (8, 1)):
        assert runner.DeviceRunner.layers_at_once(holder, "decode", size) == layers
