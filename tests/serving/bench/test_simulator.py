"""The simulator: steps learnt from a timeline, and the real engine played on them."""

import asyncio
import json
import math
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from typer.testing import CliRunner

import jmoe
from jmoe.brownout import Brownout
from serving.bench import loadgen
from serving.bench.calibrate import Calibration, FullBatch
from serving.bench.controllers import (
    ALL_BROWNOUT,
    CONDITIONS,
    SHAPES,
    Case,
    Condition,
    ControllersConfig,
    calibrated,
    figures,
    play,
    run_controllers,
    samples_of,
    spread,
)
from serving.bench.results import Record, Run, Sample, Slo
from serving.bench.simulator.device import SimulatedDevice
from serving.bench.simulator.server import Machine, Served, run_simulated, simulate
from serving.bench.simulator.step_times import Recorded, StepTimes, read_steps
from serving.bench.workload import Arrival, piecewise_poisson_times
from serving.cli.main import app
from serving.config import AuditConfig, BrownoutConfig, EngineConfig
from serving.execution.fitting import limits_of
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.startup.prepare import prepare
from tests.jmoe.conftest import add_united
from tests.serving.fake_runner import FakeRunner
from tests.serving.families import GOLDEN, settings_of

LAYERS, PICKS = 4, 2
BUCKETS = {"prefill": (32, 128), "decode": (4, 16)}
CONFIG = EngineConfig(
    max_num_seqs=16,
    max_model_len=256,
    page_size=16,
    max_prefill_tokens=128,
    reserved_ls_seqs=0,
    prefill_company=False,
    brownout=BrownoutConfig(strategy="zero"),
)


def seconds(phase, size, degraded, share):
    """Returns a step's time by a law of the kind that is fitted."""
    fixed, base, exact = (0.001, 0.004, 1e-4) if phase == "prefill" else (0.001, 0.006, 5e-4)
    base *= 1 + (size > BUCKETS[phase][0])
    return fixed + share * (base + exact * size * (1 - 0.6 * degraded))


def recorded(rng, count=400):
    for _ in range(count):
        phase = rng.choice(["prefill", "decode"])
        size = int(rng.integers(1, 129 if phase == "prefill" else 17))
        degraded, share = rng.choice([0, 0.5, 1]), rng.choice([0.25, 0.5, 1])
        yield Recorded(phase, size, degraded, share, seconds(phase, size, degraded, share))


def machine(**changes):
    times = StepTimes.fit(list(recorded(np.random.default_rng(0))), BUCKETS)
    return replace(Machine(times, LAYERS, PICKS), **changes)


def test_what_a_step_takes_is_learnt():
    times = machine().times
    for one in recorded(np.random.default_rng(1), 50):
        assert times.expected_s(*one[:4]) == pytest.approx(one.seconds, rel=1e-3)
    assert np.allclose(times.moods, 1, atol=1e-3)


def test_a_stall_teaches_nothing():
    found = [one._replace(seconds=one.seconds * (1 + 50 * (i % 40 == 0)))
             for i, one in enumerate(recorded(np.random.default_rng(0)))]  # fmt: skip
    times = StepTimes.fit(found, BUCKETS)
    assert times.expected_s("decode", 10, 0, 1) == pytest.approx(seconds("decode", 10, 0, 1), 1e-2)
    assert max(times.moods) > 40  # and comes again where it is played


def test_a_phase_that_was_not_recorded_is_named():
    one = Recorded("decode", 1, 0.0, 1.0, 0.01)
    with pytest.raises(ValueError, match="no prefill step"):
        StepTimes.fit([one], BUCKETS)


def test_a_timeline_is_read(tmp_path):
    args = {"layers": "1-2", "rows": 3, "tokens": 40, "degraded_visits": 80}
    events = [{"ph": "X", "tid": tid, "name": name, "dur": 5000.0, "args": args}
              for tid, name in ((1, "launch"), (2, "prefill"), (2, "decode"))]  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "tid": 2}, *events]}))
    assert read_steps(path, LAYERS, PICKS) == [
        Recorded("prefill", 40, 0.5, 0.5, 0.005),
        Recorded("decode", 3, 0.5, 0.5, 0.005),
    ]
    path.write_text("[]")
    with pytest.raises(ValueError, match="neither a timeline"):
        read_steps(path, LAYERS, PICKS)


def test_a_table_of_steps_is_read(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("phase,size,degraded,seconds\nprefill,40,0.5,0.005\ndecode,3,0,0.004\n")
    assert read_steps(path, LAYERS, PICKS) == [
        Recorded("prefill", 40, 0.5, 1.0, 0.005),
        Recorded("decode", 3, 0.0, 1.0, 0.004),
    ]
    path.write_text("phase,size\nprefill,40\n")
    with pytest.raises(ValueError, match="nor a table of steps: 'degraded'"):
        read_steps(path, LAYERS, PICKS)
    path.write_text("phase,size,degraded,seconds\nPrefill,40,0.5,0.005\n")
    with pytest.raises(ValueError, match="phase 'Prefill' is none of prefill, decode"):
        read_steps(path, LAYERS, PICKS)


def test_one_request_takes_its_steps():
    done = simulate(machine(overhead_s=0.5), CONFIG, [Arrival((7,) * 20, 3, at_s=1.0)])
    (record,) = done.records
    prefill, decode = seconds("prefill", 20, 0, 1), seconds("decode", 1, 0, 1)
    assert record.ttft_s == pytest.approx(prefill + 0.5, rel=1e-3)
    assert record.itls_s == pytest.approx([decode] * 2, rel=1e-3)
    assert record.e2el_s == pytest.approx(prefill + 2 * decode + 0.5, rel=1e-3)
    halved = machine(speeds=((0.0, 1.0), (1.0, 0.5)))
    asked = [Arrival((7,) * 20, 3), Arrival((8,) * 20, 3, at_s=1.0)]
    first, other = simulate(halved, CONFIG, asked).records
    assert other.e2el_s == pytest.approx(2 * first.e2el_s, rel=1e-3)


def test_brownout_is_what_the_threshold_says():
    brownout = BrownoutConfig(strategy="full", decode_threshold_percent=25, salc=False)
    config = replace(CONFIG, brownout=brownout)
    (record,) = simulate(machine(), config, [Arrival((7,) * 20, 5)]).records
    assert record.expert_visits == 24 * LAYERS * PICKS
    assert record.degraded_visits == 0.75 * 4 * LAYERS * PICKS
    assert record.itls_s == pytest.approx([seconds("decode", 1, 0.75, 1)] * 4, rel=1e-3)


@pytest.mark.usefixtures("compiled_in_a_hurry")
@pytest.mark.exhaustive
def test_a_model_answers_in_the_times_of_the_machine(tmp_path):
    """Tokens and their costs are a notebook's, of the way in force; it takes as long as without a
    model.
    """
    add_united(path := shutil.copytree(GOLDEN, tmp_path / "model"))
    prompts = [[1 + number, 2, 3, 9, 8, 7] for number in range(3)]
    fixed = {f"{phase}_threshold_percent": 0 for phase in ("prefill", "decode")}
    brownout = BrownoutConfig("partial", salc=False, way=2, **fixed)
    config = settings_of({}, "", model=str(path), models=(), brownout=brownout)
    fitting, family, runner, losses = prepare(config, None, lambda *_: None)
    cfg = family.config
    sampling = pb.SamplingParams(max_new_tokens=7, ignore_eos=True, logprobs=True)

    def answers(served, ways=(2,)):
        async def drive(server):
            found, at_s = [], []
            for way, allowed, prompt in product(ways, (True, False), prompts):
                if (await server.get_brownout()).way != way:
                    assert (await server.set_brownout(way=way)).way == way
                tokens, logprobs = [], []
                async for out in server.generate(prompt, sampling, allow_brownout=allowed):
                    tokens += out.token_ids
                    logprobs += out.logprobs
                    at_s.append(asyncio.get_running_loop().time())
                found.append((tokens, logprobs, out.usage.degraded_visits))
            return found, at_s

        own = machine(num_layers=cfg.num_layers, visits_per_layer=cfg.experts_per_token)
        return run_simulated(own, fitting, drive, served=served)

    model, served = jmoe.load(path, "float32"), Served(family, runner, losses)
    assert answers(served)[1] == answers(None)[1]
    for ways in ((2, 3), (2,)):  # a server begins with its first way, whatever one before had last
        got, _ = answers(served, ways)
        for number, (tokens, logprobs, degraded) in enumerate(got):
            allowed = number % 6 < 3
            setting = Brownout("partial", 0, ways[number // 6], "weight") if allowed else None
            want = jmoe.generate(model, [prompts[number % 3]], 7, setting, stop_token_ids=[])
            assert (tokens, degraded) == (want.tokens[0], want.degraded_visits[0])
            np.testing.assert_allclose(logprobs, want.logprobs[0], atol=1e-4)
            assert (degraded > 0) == allowed
    runner.close()


def test_a_way_is_changed_in_what_computes_the_answers():
    """Layer by layer, as a server's; without a model any of the settings' ways may be served."""
    limits = limits_of(CONFIG, LAYERS)
    device = SimulatedDevice(limits, machine(), runner=(runner := FakeRunner(limits)))
    runner.load_way = lambda *told: loaded.append(told)
    loaded = []
    device.load_way(4, 2)
    assert loaded == [(4, 2)]
    brownout = BrownoutConfig("partial", way=2, ways=(2, 4), salc=False)

    async def drive(server):
        states = [await server.set_brownout(way=way) for way in (4, 4, 2)]
        return [state.way for state in states]

    assert run_simulated(machine(), replace(CONFIG, brownout=brownout), drive) == [4, 4, 2]


def test_the_same_seed_is_the_same_run():
    noisy = replace(machine().times, moods=np.random.default_rng(3).uniform(0.8, 1.5, 100))
    asked = [Arrival((7,) * 20, 10, at_s=0.01 * i, best_effort=i % 2 == 0) for i in range(60)]

    def times(seed):
        done = simulate(replace(machine(), times=noisy), CONFIG, asked, seed)
        return [record.token_s for record in done.records]

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_refusals_are_records():
    config = replace(CONFIG, max_queue_len=1)
    done = simulate(machine(), config, [Arrival((7,) * 20, 30) for _ in range(40)])
    codes = [record.code for record in done.records]
    assert codes.count("RESOURCE_EXHAUSTED") > 0
    assert codes.count("OK") > 16


CALIBRATION = Calibration(0.01, FullBatch(0.03, 0.035, 40.0), FullBatch(0.02, 0.025, 56.0))
"""Of `machine()` with answers of 12 tokens; its objectives are 60 and 29.6 ms."""


def case(**condition):
    samples = [Arrival((number,) * 20, 12) for number in range(8)]
    config = ControllersConfig(duration_s=12.0)
    return Case(Condition(**condition), machine(), samples, (), CALIBRATION, config)


@pytest.mark.deep
def test_prediction_keeps_more_tokens_in_time_with_fewer_degraded_visits():
    """The demo's shape on made-up steps, calibrated as the demo is: late tokens are few more than
    under all brownout.
    """
    known = calibrated(machine(), case().samples, ControllersConfig())
    assert known.full.capacity_per_s > known.zero.capacity_per_s
    assert known.full.itl_p90_s < known.slo.itl_s < known.zero.itl_p90_s
    burst = case(load=0.8)._replace(calibration=known)
    alone, predictive, most = (
        play(burst, name, 0) for name in ("algorithm2", "predictive", ALL_BROWNOUT)
    )
    assert most["degraded"] == 100
    assert predictive["degraded"] < 90
    for late in ("late_first", "late_other"):
        assert most[late] - 1 <= predictive[late] < most[late] + 6  # steps fall otherwise
    assert predictive["late_first"] < alone["late_first"] / 2


@pytest.mark.sized(exhaustive=("300.0",), deep=("60.0",))
@pytest.mark.parametrize("seconds", [60.0, 300.0])
def test_a_steady_load_that_needs_no_brownout_gets_none(seconds):
    calm = case(shape="steady", load=0.1)
    calm = calm._replace(config=replace(calm.config, duration_s=seconds))
    found = play(calm, "predictive", 0)
    assert found["degraded"] == 0
    assert found["spread"] == 0
    assert max(found["late_first"], found["late_other"]) < 2


def test_spread_by_hand():
    def sample(at_s, prefill, decode):
        return Sample(at_s, prefill, decode, None, None, None, None, 0, 0, 0, 0)

    steady = [sample(at, 60, 60) for at in range(3)]
    assert spread(steady) == 0
    # Prefill spans 10 points in the first second, none in the others; decode 40, 40 and none.
    moving = [sample(0, 60, 100), sample(1, 70, 60), sample(2, 70, 100)]
    assert spread(moving) == pytest.approx((40 + 40 + 0) / 3)


def test_who_is_refused_counts_as_late():
    answered = Record("f", 2.0, token_s=[2.05, 2.06, 2.16], expert_visits=30, degraded_visits=3)
    refused = Record("f", 3.0, code="RESOURCE_EXHAUSTED")
    early = Record("f", 0.5, token_s=[9.0])
    found = figures(Run([early, answered, refused], [], 9.0, 0.0), Slo(0.1, 0.02), 1.0, 9.0)
    assert found == {
        "late_first": 50,
        "late_other": 50,
        "degraded": 10,
        "spread": 0,
        "refused": 50,
    }


@pytest.mark.parametrize(
    ("shape", "first", "most", "mean"),
    [
        ("steady", 1, 1, 1),
        ("step", 0.5, 1, 0.3 * 0.5 + 0.7),
        ("ramps", 0.5, 1, 0.3 * 0.5 + 0.7 * 0.775),
        ("comes and goes", 0.5, 1, 0.3 * 0.5 + 0.7 * 0.75),
        ("ends", 0.5, 1, 0.3 * 0.5 + 0.7 * 0.75),
        ("diurnal", None, 1, 0.6),
        ("square", 0.5, 1.5, 1),
        ("thin", 1, 1, 0.3 + 0.7 * 0.02),
        ("mmpp", None, 1.2, 0.8),
    ],
)
def test_shapes_have_the_rates_that_they_should(shape, first, most, mean):
    t = np.arange(0.0, 600.0, 0.25)
    x = (t / 600 - 0.3) / 0.7
    shares = np.asarray(SHAPES[shape](t, x, 0.25, np.random.default_rng(0)))
    assert first is None or shares[1 if shape == "square" else 0] in (first, most)
    assert shares.max() == pytest.approx(most)
    assert shares.mean() == pytest.approx(mean, abs=0.06)


@pytest.mark.sized(
    deep=(
        "step to 0.74",
        "square",
        "half speed",
        "speed 0.8",
        "noise doubled",
        "ramps",
        "ends",
        "no burst",
        "diurnal",
    )
)
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_have_their_mix_and_their_load(name):
    mix = CONDITIONS[name].mix
    samples = samples_of(mix)
    prompts = [len(sample.prompt) for sample in samples]
    new = [sample.max_new_tokens for sample in samples]
    assert max(p + n for p, n in zip(prompts, new, strict=True)) <= 256
    least, most = {
        "prompts": (100, 3),
        "giant prompts": (25, 17),
        "decode only": (1, 60),
        "heavy tails": (18, 30),
    }.get(mix, (5, 60))
    assert np.mean(prompts) > least
    assert np.mean(new) < most
    own = case()._replace(condition=CONDITIONS[name], samples=samples)
    own = own._replace(config=replace(own.config, duration_s=100.0))
    arrivals, again = own.arrivals(3), own.arrivals(3)
    assert arrivals == again != own.arrivals(4)
    if CONDITIONS[name].shape == "steady":
        expected = 100 * CONDITIONS[name].load * CALIBRATION.full.capacity_per_s
        assert len(arrivals) == pytest.approx(expected, rel=0.1)


def test_lengths_may_be_ones_own():
    config = ControllersConfig(mix=(40.0, 90.0, 0.3), settings=("engine.max_model_len=1024",))
    samples = samples_of("tasks", config)
    assert np.mean([len(sample.prompt) for sample in samples]) == pytest.approx(40, rel=0.1)
    assert np.mean([sample.max_new_tokens for sample in samples]) == pytest.approx(90, rel=0.1)
    with pytest.raises(ValueError, match=r"mix is .0, 9, 1.; it must be two means of 1 token"):
        ControllersConfig(mix=(0, 9, 1))
    with pytest.raises(ValueError, match=r"mix is .9, 9, inf.; .* a spread of 0 or more, which is"):
        ControllersConfig(mix=(9, 9, math.inf))


def test_the_table_of_an_h100_has_what_was_measured(request):
    """docs/controllers.md has the command."""
    path = request.config.rootpath / "benchmarks/h100-80gb-hbm3/steps.csv"
    times = StepTimes.fit(
        read_steps(path, LAYERS, PICKS), {"prefill": (64, 512), "decode": (8, 32, 64)}
    )
    steps = json.loads(path.with_name("step.json").read_text())
    for name, degraded in (("zero", 0.0), ("way8-t40", 0.6)):
        for rows in (8, 32, 64):
            (us,) = (one["timing"]["us"] for one in steps
                     if one["case"]["name"] == f"decode/{name}/b{rows}")  # fmt: skip
            assert times.expected_s("decode", rows, degraded, 1) == pytest.approx(
                us / 1e6, rel=0.03
            )
    assert times.expected_s("prefill", 204, 0.0, 1) == pytest.approx(0.012, rel=0.05)


def test_a_share_of_the_requests_allows_no_brownout():
    brownout = BrownoutConfig("partial", way=8, decode_threshold_percent=0, salc=False)
    config = replace(CONFIG, brownout=brownout)
    asked = [Arrival((7,) * 20, 10, at_s=0.01 * i) for i in range(200)]
    done = simulate(machine(), config, asked, exempt_share=0.25)
    exempt = [record for record in done.records if not record.degraded_visits]
    assert 30 < len(exempt) < 70


def audited(share, due_s, seed=0):
    """Serves requests of 20 and 12 tokens under thresholds of 60 %, with an audit. Returns the run,
    and how many answers were scored before the last request got a slot, and in all.
    """
    fixed = {f"{phase}_threshold_percent": 60 for phase in ("prefill", "decode")}
    brownout = BrownoutConfig("partial", way=8, salc=False, **fixed)
    config = replace(CONFIG, brownout=brownout, max_queue_len=len(due_s))
    asked = [Arrival((number % 8,) * 20, 12, at_s=at_s) for number, at_s in enumerate(due_s)]

    async def drive(server):
        server.engine.auditor.config = AuditConfig() if share is None else AuditConfig(share=share)
        player = loadgen.play(server, asked, time_limit_s=math.inf, sample_every_s=1.0)
        playing = asyncio.create_task(player)
        await asyncio.sleep(due_s[-1] + 0.1)
        while server.engine.stats().num_waiting:
            await asyncio.sleep(0.01)
        before = server.engine.stats().audits[0].num_scored
        run = await playing
        return run, before, server.engine.stats().audits[0].num_scored

    return run_simulated(machine(), config, drive, seed)


def met(runs):
    """Returns tokens a second, and both P90 latencies, of all runs together."""
    records = [record for run in runs for record in run.records]
    spent_s = sum(max(record.token_s[-1] for record in run.records) for run in runs)
    itls_s = [gap_s for record in records for gap_s in record.itls_s]
    p90s = np.percentile([r.ttft_s for r in records], 90), np.percentile(itls_s, 90)
    return np.array([sum(len(r.token_s) for r in records) / spent_s, *p90s])


@pytest.mark.sized(
    deep=("10-1-20.0-0.01",), exhaustive=("10-8-30.0-0.01", "30-8-30.0-0.01", "45-8-30.0-0.03")
)
@pytest.mark.parametrize(
    ("per_s", "seeds", "seconds", "most"),
    [(10, 1, 20.0, 0.01), (10, 8, 30.0, 0.01), (30, 8, 30.0, 0.01), (45, 8, 30.0, 0.03)],
)
def test_an_audit_costs_others_hardly_anything(per_s, seeds, seconds, most):
    """The machine serves 63 requests a second at most. docs/operating.md has the figures."""
    due = [piecewise_poisson_times([(seconds, per_s)], seed) for seed in range(seeds)]
    off, on = ([audited(share, at, n) for n, at in enumerate(due)] for share in (0.0, None))
    assert not any(scored for *_, scored in off)
    assert sum(scored for *_, scored in on) >= 8 * seeds
    ratio = met([run for run, *_ in on]) / met([run for run, *_ in off])
    print(f"{per_s}/s: throughput, P90 of TTFT and ITL with the audit over without: {ratio}")
    assert ratio == pytest.approx([1, 1, 1], abs=most)


def test_an_audit_scores_nothing_under_full_load():
    off, *_ = audited(0.0, [0.0] * 200)
    on, before, scored = audited(None, [0.0] * 200)
    assert before == 0 < scored  # as soon as nobody waits
    ratio = met([on]) / met([off])
    print(f"full load: throughput, P90 of TTFT and ITL with the audit over without: {ratio}")
    assert ratio == pytest.approx([1, 1, 1], abs=0.01)


def test_settings_are_checked_before_a_server_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "serving.bench.controllers.timed_machine", lambda *_: pytest.fail("it was timed")
    )
    for pair, named in (("foo", "--set foo has no value"), ("engine.foo=1", "engine.foo")):
        ended = CliRunner().invoke(
            app, ["bench", "controllers", "--set", pair, "--out", str(tmp_path / "out")]
        )
        assert isinstance(ended.exception, ValueError)
        assert named in str(ended.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.deep
def test_the_command_compares_on_a_table_of_steps_and_on_a_trace(tmp_path, capsys):
    table, trace = tmp_path / "steps.csv", tmp_path / "trace.csv"
    rows = (f"{one.phase},{one.size},{one.degraded},{seconds(*one[:3], 1)}"
            for one in recorded(np.random.default_rng(0)))  # fmt: skip
    table.write_text("\n".join(["phase,size,degraded,seconds", *rows]))
    lines = (f"{at / 10},{20 + at},5" for at in range(60))
    trace.write_text("\n".join(["Timestamp,Request tokens,Response tokens", *lines]))
    result = run_controllers(
        ControllersConfig(
            conditions=("decode only",),
            controllers=("predictive",),
            seeds=2,
            duration_s=2.0,
            times=table,
            traces=(trace,),
            settings=("engine.admission=objective",),  # nobody is refused while calibrating
            processes=1,
            out=tmp_path / "out",
        )
    )
    assert json.loads((tmp_path / "out" / "controllers.json").read_text()) == result
    assert list(result["conditions"]) == ["decode only", "trace.csv"]
    for of in result["conditions"].values():
        assert of["figures"][ALL_BROWNOUT]["degraded"]["median"] == 100
        assert of["figures"]["predictive"]["degraded"]["median"] < 100
    assert (tmp_path / "out" / "controllers.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("predictive") == 2
