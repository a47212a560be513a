"""Parts of the GPU benchmark with tiny models on a CPU: the code that a GPU will run."""

import dataclasses
import json
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import (
    burst_part,
    distill_part,
    family_part,
    hf_dir,
    layers_part,
    live,
    mesh_part,
    models,
    part,
    priority_part,
    report,
    run,
    startup_part,
    step_part,
)
from benchmarks.gpu.sizes import DRY, hf_config
from benchmarks.harness import store
from jmoe import api
from jmoe.config import from_hf
from serving.config import EngineConfig

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry():
    """Compiles with little optimization, since compiling takes most of the time; servers that tests
    start inherit this.

    Parts turn XLA's cache on, for all of a process: off again, or no later test in it can keep a
    compiled program (`serving.execution.executables`).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)
        jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module", autouse=True)
def _ordinary_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def context(folder):
    kept = store.Store(folder, {"sources": "1"})
    return part.Context(DRY, kept, folder, folder / "cache")


def run_all(name, context, match=""):
    """Runs the cases of a part that match, stores each as the command does, and returns the
    records.
    """
    about = {**context.kept.revision, "commit": "abc", "machine": {"device": "x"}, "skew": 1.0}
    about |= {"weights": "random"}
    with run.module(name).session(context) as run_case:
        for case in run.module(name).cases(context.sizes):
            if match in case.name:
                run._run_case(name, case, run_case, context, about)
    return context.kept.records(name)


# ---- models, their files and their bytes ----


def test_a_written_directory_is_the_model_it_was_written_from(folder):
    config = hf_config("tiny")
    model = models.make(DRY, ways=(8,))
    hf_dir.write(folder / "hf", config, model)
    read = api.load(folder / "hf", "float32")
    assert jax.tree.structure(read.params) == jax.tree.structure(model.params)
    for ours, theirs in zip(*map(jax.tree.leaves, (model.params, read.params)), strict=True):
        assert jnp.array_equal(ours, theirs)
    slots = np.asarray(model.table.slots)[:, :16]
    for name in ("gate_up", "down"):
        ours, theirs = getattr(model.pool, name), getattr(read.pool, name)
        assert jnp.array_equal(ours[slots], theirs[np.asarray(read.table.slots)[:, :16]])
    np.testing.assert_array_equal(read.united[8].gate_up, model.united[8].gate_up)
    assert json.loads((folder / "hf" / "config.json").read_text())["architectures"] == [
        "Qwen2MoeForCausalLM"
    ]


def test_bytes_and_operations_by_hand():
    cfg = from_hf(hf_config("qwen1.5-moe-a2.7b"))
    read = models.decode_bytes(cfg, "bfloat16", batch=64, context=512, active_experts=56.0)
    assert read["experts"] == 56 * 24 * 3 * 2048 * 1408 * 2
    assert read["kv"] == 64 * 512 * 24 * 2 * 16 * 128 * 2
    attention, shared = 4 * 2048 * 2048 + 3 * 2048, 3 * 2048 * 5632 + 2048
    layer = attention + shared + 2048 * 60 + 2 * 2048  # router, two norms
    assert read["other_weights"] == 2 * (24 * layer + 2048 * 151936 + 2048)
    assert read["total"] == sum(read[k] for k in ("experts", "other_weights", "kv"))
    tiny = from_hf(hf_config("tiny"))
    # One row of one position: every product once, one pair of attention a head.
    macs = 2 * (4 * 32 * 32 + 32 * 16 + 3 * 32 * (2 * 16 + 16)) + 32 * 96
    assert models.prefill_flops(tiny, [(1, 1)]) == 2 * macs + 4 * 32 * 2
    whole, halves = models.prefill_flops(tiny, [(8, 8)]), [(4, 4), (4, 8)]
    assert models.prefill_flops(tiny, halves) - whole == 2 * 32 * 96  # the head runs twice


# ---- parts ----


def test_steps_count_the_experts_that_have_rows(context):
    case = next(c for c in step_part.cases(DRY) if c.name == "decode/way2-t0/b4")
    with step_part.session(context) as run_case:
        record = run_case(case)
        exact = run_case(step_part.cases(DRY)[0])
    figures = record["figures"]
    # Four rows of two picks reach 2 to 8 experts; united pairs can only be fewer.
    assert 2 <= figures["active_experts"] < exact["figures"]["active_experts"] <= 8
    assert figures["over_floor"] == pytest.approx(figures["span_us"] / figures["floor_us"])
    seen = record["bytes"]["experts"] / (2 * 3 * 32 * 16 * 4)
    assert seen == pytest.approx(figures["active_experts"])
    assert record["temporary_bytes"] >= 0


@pytest.mark.exhaustive
def test_layers_are_compared_row_by_row(context):
    (case,) = layers_part.cases(DRY)
    record = layers_part.compare(context, case)
    assert "failed" not in record
    (check,) = record["checks"]
    assert check["errors"]["decode_logprobs"]["rows"] == 8 * 6
    assert check["errors"]["prefill_logprobs"]["rows"] == 8 * 10


@pytest.mark.exhaustive
def test_a_layer_is_distilled(context):
    with distill_part.session(context) as run_case:
        record = run_case(*distill_part.cases(DRY))
    assert "failed" not in record
    figures = record["figures"]
    assert figures["rows"] == 1024
    assert figures["error_after"] < figures["error_before"] < 2
    assert figures["layer_s"] == pytest.approx(
        figures["capture_s"] + 600 * figures["step_ms"] / 1000
    )


def test_a_layer_that_is_off_is_found():
    rng = np.random.default_rng(0)
    theirs = abs(rng.normal(size=400))
    assert layers_part.judge(theirs * 1.2, theirs)["passed"]
    assert not layers_part.judge(theirs * 1.7, theirs)["passed"]
    for share, passed in ((0.03, True), (0.2, False)):  # rows at the edge of a tile, say
        ours = np.where(rng.random(400) < share, 50.0, theirs)
        assert layers_part.judge(ours, theirs)["passed"] == passed
    assert not layers_part.judge(np.where(theirs > 1, np.nan, theirs), theirs)["passed"]


def test_a_family_shares_three_quarters_of_each_layers_experts():
    family = models.make_family(DRY)
    slots = np.stack([np.asarray(model.weights.table.slots) for model in family])
    same = slots[0] == slots[1]
    assert same.sum(axis=1).tolist() == [12, 12]  # of 16
    assert family[0].pool.down.shape[0] == family.sharing.num_slots == 2 * (16 + 4)
    assert sorted(np.unique(slots)) == list(range(40))
    down = np.asarray(family[0].pool.down)
    assert len({expert.tobytes() for expert in down}) == 40  # each is drawn, none twice
    assert not jnp.array_equal(family[0].params["embed"], family[1].params["embed"])


def test_visits_of_both_are_those_of_shared_experts():
    seen = family_part.Visits(
        jnp.zeros(2, jnp.int32), jnp.zeros(2), jnp.zeros((1, 4), bool), jnp.zeros(())
    )
    shared = jnp.array([[True, True, False, False]])
    rows = [[True, False, True, True], [True, True, True, False], [False, True, False, False]]
    for number, visited in zip((0, 1, 0), rows, strict=True):
        seen = seen.after(jnp.int32(number), jnp.array([visited]), shared)
    assert seen.steps.tolist() == [2, 1]
    assert seen.active.tolist() == [3 + 1, 3]
    assert float(seen.both) == 1  # 0 is shared; 2 is each model's own
    assert seen.first.tolist() == [rows[2]]


def test_mixed_steps_are_held_to_steps_in_turn(context):
    record = run_all("family", context, "decode")["decode/b4"]
    assert "failed" not in record
    f, expert, kv = record["figures"], 3 * 32 * 16 * 4, 4 * 12 * 2 * 2 * 2 * 16 * 4
    active, both = f["active_experts_of_each"], f["active_experts_of_both"]
    assert 2 <= active <= 4  # two rows of two picks
    assert 0 < both < active
    _, others = models.weight_bytes(from_hf(hf_config("tiny")), "float32")
    mixed, alternating = record["bytes"]["mixed"], record["bytes"]["alternating"]
    own = 2 * others + kv  # both models' weights beside experts, in one step as in two
    assert mixed - own == pytest.approx(2 * (2 * active - both) * expert, rel=1e-3)
    assert alternating - own == pytest.approx(2 * 2 * active * expert, rel=1e-3)
    ratio = f["mixed_us"] / f["alternating_us"]
    assert f["mixed_over_alternating"] == pytest.approx(ratio, rel=1e-4)
    assert f["floors_mixed_over_alternating"] == pytest.approx(mixed / alternating, rel=1e-4)


def test_a_step_over_a_mesh_of_one_is_the_plain_step(context):
    record = run_all("mesh", context)["decode/b4"]
    assert "failed" not in record
    f = record["figures"]
    assert 2 <= f["plain_active_experts"] <= 8  # four rows of two picks
    assert f["mesh_over_plain"] == pytest.approx(f["mesh_us"] / f["plain_us"], rel=1e-4)
    # The same weights, rows and pages: token by token, for as long as the two chains go.
    model = models.make(DRY)
    cfg = model.config
    home = mesh_part.Home(
        mesh_part.make_mesh(1), mesh_part.contiguous(cfg.num_moe_layers, cfg.num_experts, 1)
    )
    tokens = []
    for weights, where in ((model.weights, None), (home.spread(model.weights), home)):
        program = mesh_part._program(DRY, model, weights, where, 4)
        tokens.append([np.asarray(program(i).tokens).tolist() for i in range(4)])
    assert tokens[0] == tokens[1]
    assert len(set(map(tuple, tokens[0]))) > 1


@pytest.fixture(scope="module")
def server(context):
    """Yields one server for the parts that need one."""
    with live.live(context, "shared") as found:
        yield found


@pytest.fixture
def shared(monkeypatch, server):
    class Shared:
        def __enter__(self):
            return server

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(live, "live", lambda context, name: Shared())


def test_serving_points_are_measured_under_every_setting(context, shared, folder):
    records = run_all("serve", context)
    assert not [r["failed"] for r in records.values() if "failed" in r]
    capacity = records["capacity/tiny"]["figures"]
    zero, way8 = (records[f"point/tiny/{n}/load1.5"] for n in ("zero", "way8-t40"))
    assert zero["figures"]["rate_s"] == pytest.approx(1.5 * capacity["requests_s"], rel=1e-3)
    assert zero["figures"]["output_tokens_s"] > 0
    assert zero["figures"]["degraded_share"] in (0, None)
    assert way8["figures"]["degraded_share"] > 0.1
    assert way8["server_steps"]["decode"]["active_experts"] > 0
    assert all(
        r["server_steps"]["compilations_since_ready"] == 0
        for name, r in records.items()
        if name.startswith("point/")
    )
    offline = records["offline/tiny/zero"]["figures"]
    asked = live.requests(DRY, DRY.mixes[0], DRY.transformers_requests)
    assert offline["output_tokens"] == sum(one.max_new_tokens for one in asked)


def test_the_legs_of_a_burst_have_the_same_arrivals_and_objectives(context, shared, folder):
    records = run_all("burst", context)
    assert not [r["failed"] for r in records.values() if "failed" in r]
    zero, *with_brownout = (records[f"{n}/tiny"] for n in ("zero", "algorithm2", "predictive"))
    for brownout in with_brownout:
        assert zero["slo"]["ttft_s"] == brownout["slo"]["ttft_s"]
        assert zero["run"]["first_tokens"] == brownout["run"]["first_tokens"] > 0
    assert zero["figures"]["degraded_share"] == 0
    assert zero["figures"]["burst_decode_threshold_percent"] == 100
    assert brownout["burst_rate_per_s"] == pytest.approx(
        2 * brownout["steady_rate_per_s"], rel=1e-3
    )
    assert report.main(folder, DRY) == 0


def test_a_leg_without_its_calibration_says_so(context, server, tmp_path):
    bare = dataclasses.replace(context, kept=store.Store(tmp_path, {"sources": "2"}))
    leg = burst_part.cases(DRY)[1]
    with pytest.raises(RuntimeError, match="calibration/tiny is not measured"):
        server.run(burst_part._leg(bare, server, leg))


@pytest.mark.exhaustive
def test_best_effort_is_played_beside_the_same_latency_sensitive_requests(
    context, server, monkeypatch
):
    @contextmanager
    def of_policy(context, name, more):
        if more["engine.policy"] == EngineConfig().policy:  # the shared server's, too
            yield server
        else:
            with live.live(context, name, more=more) as other:
                yield other

    monkeypatch.setattr(priority_part, "live", of_policy)
    records = run_all("priority", context)
    assert not [r["failed"] for r in records.values() if "failed" in r]
    alone, ours, fcfs = (records[f"{n}/load1.2"] for n in ("alone", priority_part.POLICY, "fcfs"))
    policies = [r["server"].get("engine.policy") for r in (alone, ours, fcfs)]
    assert policies == [None, None, "fcfs"]  # not set: as served by default
    asked = [r["figures"]["ls_requests"] for r in (alone, ours, fcfs)]
    assert asked[0] == asked[1] == asked[2] > 0
    assert alone["figures"]["be_tokens_s"] == alone["classes"]["best_effort"]["requests_due"] == 0
    for record in (ours, fcfs):
        figures = record["figures"]
        assert figures["be_tokens_s"] > figures["ls_tokens_s"] > 0  # four fifths are best effort
        ratio = figures["ls_ttft_p99_ms"] / alone["figures"]["ls_ttft_p99_ms"]
        assert figures["ttft_p99_to_alone"] == pytest.approx(ratio, rel=1e-4)
        assert 0 <= figures["preemption_p50_ms"] <= figures["preemption_p99_ms"]
    met = ours["figures"]["ttft_p99_to_alone"] <= 1.5
    assert ours["target"] == {"ttft_p99_to_alone": 1.5, "met": met}
    assert alone.get("target") is fcfs["target"] is None
    assert ours["server_steps"]["compilations_since_ready"] == 0


def test_requests_of_every_kind_compile_nothing(server):
    assert set(server.started) >= {"drawing", "compiling", "ready"}
    assert server.run(startup_part._exercise(DRY, server)) == 0
