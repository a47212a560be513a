"""The simulator: steps learnt from a timeline, and the real engine played on them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulator import burst
from serving.bench.results import Sample, Slo
from serving.bench.simulator.server import Machine, simulate
from serving.bench.simulator.step_times import Recorded, StepTimes, read_timeline
from serving.bench.variants import ALL, VARIANTS, server_settings
from serving.bench.workload import Arrival
from serving.config import BrownoutConfig, EngineConfig

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
    assert read_timeline(path, LAYERS, PICKS) == [
        Recorded("prefill", 40, 0.5, 0.5, 0.005),
        Recorded("decode", 3, 0.5, 0.5, 0.005),
    ]
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a timeline"):
        read_timeline(path, LAYERS, PICKS)


def test_one_request_takes_its_steps():
    done = simulate(machine(overhead_s=0.5), CONFIG, [Arrival((7,) * 20, 3, at_s=1.0)])
    (record,) = done.run.records
    prefill, decode = seconds("prefill", 20, 0, 1), seconds("decode", 1, 0, 1)
    assert record.ttft_s == pytest.approx(prefill + 0.5, rel=1e-3)
    assert record.itls_s == pytest.approx([decode] * 2, rel=1e-3)
    assert done.busy_s == pytest.approx(prefill + 2 * decode, rel=1e-3)
    slow = simulate(machine(speed=0.5), CONFIG, [Arrival((7,) * 20, 3)])
    assert slow.busy_s == pytest.approx(2 * done.busy_s, rel=1e-3)


def test_brownout_is_what_the_threshold_says():
    brownout = BrownoutConfig(strategy="full", decode_threshold_percent=25, salc=False)
    config = replace(CONFIG, brownout=brownout)
    (record,) = simulate(machine(), config, [Arrival((7,) * 20, 5)]).run.records
    assert record.expert_visits == 24 * LAYERS * PICKS
    assert record.degraded_visits == 0.75 * 4 * LAYERS * PICKS
    assert record.itls_s == pytest.approx([seconds("decode", 1, 0.75, 1)] * 4, rel=1e-3)


def test_the_same_seed_is_the_same_run():
    noisy = replace(machine().times, moods=np.random.default_rng(3).uniform(0.8, 1.5, 100))
    asked = [Arrival((7,) * 20, 10, at_s=0.01 * i, best_effort=i % 2 == 0) for i in range(60)]

    def times(seed):
        done = simulate(replace(machine(), times=noisy), CONFIG, asked, seed)
        return [record.token_s for record in done.run.records]

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_refusals_are_records():
    config = replace(CONFIG, max_queue_len=1)
    done = simulate(machine(), config, [Arrival((7,) * 20, 30) for _ in range(40)])
    codes = [record.code for record in done.run.records]
    assert codes.count("RESOURCE_EXHAUSTED") > 0
    assert codes.count("OK") > 16


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ValueError, match="jmoe demo --out"):
        burst.read_live(tmp_path)


@pytest.mark.deep
def test_prediction_keeps_more_tokens_in_time_with_fewer_degraded_visits():
    """The demo's shape on made-up steps, calibrated as the demo is."""
    samples = tuple(Arrival((7,) * 20, 12) for _ in range(8))
    live = burst.Live({"calibration": {"unloaded_ttft_s": 0.01}}, machine(), samples)
    known = burst.calibrated(live)
    assert known.full.capacity_per_s > known.zero.capacity_per_s
    assert known.full.itl_p90_s < known.slo.itl_s < known.zero.itl_p90_s
    pieces = [(3.6, 25.0), (8.4, known.zero.capacity_per_s)]
    zero, alone, company, predictive = (
        burst.play(live, known.slo, pieces, server_settings(VARIANTS[name]), 0) for name in ALL
    )
    assert zero["degraded"] == 0
    assert zero["late_other"] > 50
    for late in ("late_first", "late_other"):
        assert company[late] < zero[late] / 3
        assert predictive[late] < 0.7 * min(alone[late], company[late])
    assert predictive["degraded"] < 0.95 * alone["degraded"]


@pytest.mark.sized(deep=("300.0",))
@pytest.mark.parametrize("seconds", [60.0, 300.0])
def test_a_steady_load_that_needs_no_brownout_gets_none(seconds):
    live = burst.Live({}, machine(), tuple(Arrival((7,) * 20, 12) for _ in range(8)))
    slo, pieces = Slo(0.1, 0.030), [(1.0, 5.0), (seconds, 5.0)]
    found = burst.play(live, slo, pieces, server_settings(VARIANTS["predictive"]), 0)
    assert found["degraded"] == 0
    assert max(found["late_first"], found["late_other"]) < 1


def test_recovery_by_hand():
    def sample(at_s, percent):
        return Sample(at_s, 100, percent, None, None, None, None, 0, 0, 0, 0)

    samples = [sample(5, 10), sample(10.5, 40), sample(12, 99), sample(14, 100), sample(21, 50)]
    assert burst.recovered_s(samples, [(10.0, 50.0), (10.0, 25.0)]) == 2
    assert burst.recovered_s(samples[:1], [(10.0, 50.0), (10.0, 25.0)]) == 0


def test_a_share_of_the_requests_allows_no_brownout():
    brownout = BrownoutConfig("partial", way=8, decode_threshold_percent=0, salc=False)
    config = replace(CONFIG, brownout=brownout)
    asked = [Arrival((7,) * 20, 10, at_s=0.01 * i) for i in range(200)]
    done = simulate(machine(), config, asked, exempt_share=0.25)
    exempt = [record for record in done.run.records if not record.degraded_visits]
    assert 30 < len(exempt) < 70


@pytest.mark.parametrize("condition", burst.CONDITIONS.values(), ids=str)
def test_bursts_last_as_long_as_they_should(condition):
    pieces = burst.pieces_of(condition.shape, 75.0, 60.0)
    assert sum(seconds for seconds, _ in pieces) == pytest.approx(75, abs=5)
    assert pieces[0] == (22.5, 30.0)
    assert max(rate for _, rate in pieces) == {"steady": 30, "triples": 90}.get(condition.shape, 60)
