import asyncio
import math

import pytest
import scripted_server

from serving.bench.calibrate import Calibration, CalibrationError, FullBatch, calibrate, full_batch
from serving.bench.loadgen import play, saturate
from serving.bench.results import (
    Record,
    Run,
    Slo,
    late_shares,
    latency_summary,
    quality,
    summarize,
    thresholds_seen,
    violations,
)
from serving.bench.workload import Arrival
from serving.client import Client


def about(expected):
    return pytest.approx(expected, abs=1e-6)


@pytest.fixture
async def simulated():
    """Returns a scripted server without a socket, in an event loop with simulated time."""
    servicer = scripted_server.Scripted()
    return scripted_server.Direct(servicer), servicer


def ask(script, at_s=0.0, answer=None, family="f"):
    return Arrival(script, 16, answer, family, at_s=at_s)


def record(at_s, *token_s, code="OK", **more):
    end_s = token_s[-1] if token_s else at_s
    return Record("f", at_s, sent_s=at_s, token_s=list(token_s), end_s=end_s, code=code, **more)


# -- in simulated time ---------------------------------------------------------------------------


@pytest.mark.simulated_time
async def test_a_rounding_error_does_not_stop_the_sampler(simulated):
    client, _ = simulated
    await asyncio.sleep(0.001)  # from here, half seconds add up to a little less than 1
    run = await asyncio.wait_for(play(client, [ask("1600")], time_limit_s=5), 4)
    assert [round(sample.at_s, 6) for sample in run.samples] == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.simulated_time
async def test_times_are_those_of_the_script(simulated):
    client, servicer = simulated
    run = await play(client, [ask("100,50,50", at_s=0.05, answer=" xxx\n")], time_limit_s=5)
    (measured,) = run.records
    assert measured.sent_s == about(0.05)
    assert measured.ttft_s == about(0.1)
    assert measured.itls_s == about([0.05, 0.05])
    assert measured.tpot_s == about(0.05)
    assert measured.e2el_s == about(0.2)
    assert run.duration_s == about(0.25)
    assert measured.correct
    assert (measured.text, measured.finish_reason) == ("xxx", "stop")
    assert (measured.expert_visits, measured.degraded_visits) == (30, 0)
    assert measured.decode_threshold == (100, 100)
    assert servicer.requests[0].sampling.max_new_tokens == 16


@pytest.mark.simulated_time
async def test_load_is_open_and_latency_counts_from_the_schedule(simulated):
    client, servicer = simulated
    servicer.slots = asyncio.Semaphore(1)
    run = await play(client, [ask("100") for _ in range(3)], time_limit_s=5)
    assert [r.sent_s for r in run.records] == about([0, 0, 0])
    assert sorted(r.ttft_s for r in run.records) == about([0.1, 0.2, 0.3])


@pytest.mark.simulated_time
async def test_failures_are_recorded_and_late(simulated):
    client, _ = simulated
    scripts = ["10,10", "refuse", "10,die", "hang", ""]
    ended = []
    run = await play(
        client, [ask(s, answer="xx") for s in scripts], time_limit_s=0.6, on_record=ended.append
    )
    assert [r.code for r in run.records] == [
        "OK", "RESOURCE_EXHAUSTED", "INTERNAL", "DEADLINE_EXCEEDED", "OK",
    ]  # fmt: skip
    assert run.records[1].error == "queue is full"
    assert len(run.records[2].token_s) == 1
    assert run.duration_s == about(0.6)
    late = violations(run.records, Slo(ttft_s=0.5, itl_s=0.5))
    assert (late["first_tokens"], late["late_first_tokens"]) == (5, 3)
    assert (late["other_tokens"], late["late_other_tokens"]) == (1, 0)
    # Of the two that were answered, the empty one is wrong.
    assert quality(run.records)["accuracy"] == 0.5
    assert summarize(run)["failures"]["INTERNAL"] == 1
    assert ended[-1] is run.records[3]
    assert sorted(map(id, ended)) == sorted(map(id, run.records))


@pytest.mark.simulated_time
async def test_what_is_due_after_the_time_limit_fails_unsent(simulated):
    client, servicer = simulated
    run = await play(client, [ask("1"), ask("1", at_s=0.3)], time_limit_s=0.2)
    assert [r.code for r in run.records] == ["OK", "DEADLINE_EXCEEDED"]
    assert len(servicer.requests) == 1


@pytest.mark.simulated_time
async def test_concurrency_limit_defers_when_a_request_is_due(simulated):
    client, _ = simulated
    run = await play(client, [ask("60") for _ in range(6)], time_limit_s=5, max_concurrency=2)
    assert [r.ttft_s for r in run.records] == about([0.06] * 6)
    assert run.duration_s == about(0.18)


@pytest.mark.simulated_time
async def test_samples_follow_the_brownout_state(simulated):
    client, _ = simulated
    seen = []

    async def change():
        await asyncio.sleep(0.3)
        state = await client.set_brownout(salc_enabled=True, ttft_slo_s=0.5)
        assert (state.salc_enabled, state.ttft_slo_s) == (True, 0.5)

    task = asyncio.create_task(change())
    run = await play(
        client, [ask("600")], time_limit_s=5, sample_every_s=0.125, on_sample=seen.append
    )
    await task
    assert [s.at_s for s in run.samples] == [0, 0.125, 0.25, 0.375, 0.5]
    assert [s.decode_threshold_percent for s in run.samples] == [100, 100, 100, 20, 20]
    assert run.samples[1].num_running == 1
    assert run.samples[0].itl_p90_s is None
    assert seen == run.samples


@pytest.mark.simulated_time
async def test_saturation_keeps_the_batch_full_and_measures_capacity(simulated):
    client, servicer = simulated
    scripts = [ask("20,20"), ask("20,20,20,20")] * 500
    run = await saturate(client, scripts, concurrency=4, duration_s=1.0)
    # 4 requests at a time, 3 tokens on average, a token every 20 ms; the window cuts one in 40.
    measured = full_batch(run, 0.2, 1.0)
    assert measured.capacity_per_s == pytest.approx(200 / 3, rel=0.03)
    assert measured.itl_p90_s == about(0.02)
    assert len(run.records) == len(servicer.requests)
    assert all(r.ok for r in run.records)


@pytest.mark.simulated_time
async def test_calibration_does_not_take_a_machine_held_up_for_a_slow_one(simulated):
    client, servicer = simulated
    said = []

    def say(text):
        said.append(text)
        servicer.slowness = 5.0 if len(said) in (2, 5) else 1.0  # the first zero, the last full

    found = await calibrate(client, [ask("20,20")] * 13, window_s=0.6, say=say)
    # 4 requests at a time, a token every 20 ms, or every 10 at threshold 0.
    assert ["no brownout" in text for text in said] == [True, True, False, True, False]
    assert found.zero.capacity_per_s == pytest.approx(100, rel=0.05)
    assert found.full.capacity_per_s == pytest.approx(200, rel=0.05)
    assert (found.zero.itl_p90_s, found.full.itl_p90_s) == about((0.02, 0.01))


@pytest.mark.simulated_time
async def test_calibration_takes_the_only_request_that_its_window_held(simulated):
    client, servicer = simulated

    def say(text):
        servicer.slowness = 40.0 if "single" in text else 1.0  # 800 ms a token

    found = await calibrate(client, [ask("20,20")] * 13, window_s=0.6, say=say)
    assert found.unloaded_ttft_s == about(0.8)


@pytest.mark.simulated_time
async def test_a_window_too_short_for_two_tokens_says_so(simulated):
    client, _ = simulated
    with pytest.raises(CalibrationError, match=r"between 0.02 and 0.1 s: measure for longer"):
        await calibrate(client, [ask("20,200")] * 13, window_s=0.1)


@pytest.mark.parametrize(
    ("full_ttft_s", "expected_s"), [(0.009, 0.030), (0.025, 0.075), (math.nan, 0.030)]
)
def test_the_ttft_objective_leaves_a_full_batch_room(full_ttft_s, expected_s):
    zero, full = FullBatch(0.040, 0.020, 100.0), FullBatch(full_ttft_s, 0.005, 150.0)
    slo = Calibration(0.010, zero, full).slo
    assert (slo.ttft_s, slo.itl_s) == (pytest.approx(expected_s), pytest.approx(0.010))


# -- over a socket -------------------------------------------------------------------------------


@pytest.fixture
async def scripted():
    server, servicer, address = await scripted_server.start()
    async with Client(address) as client:
        yield client, servicer
    await server.stop(None)


async def test_statuses_of_the_wire_are_recorded(scripted):
    client, servicer = scripted
    scripts = ["1,1", "refuse", "1,die", "1,cancel", ""]
    run = await play(client, [ask(s) for s in scripts], time_limit_s=60, model="scripted")
    assert [r.code for r in run.records] == [
        "OK", "RESOURCE_EXHAUSTED", "INTERNAL", "CANCELLED", "OK",
    ]  # fmt: skip
    assert run.records[1].error == "queue is full"
    assert {r.model for r in servicer.requests} == {"scripted"}
    assert run.samples


async def test_what_hangs_ends_at_the_time_limit(scripted):
    client, _ = scripted
    run = await play(client, [ask("hang")], time_limit_s=0.2)
    assert [r.code for r in run.records] == ["DEADLINE_EXCEEDED"]


@pytest.mark.parametrize("limit_s", [math.inf, 1e12])
async def test_a_limit_that_never_comes_is_none(scripted, limit_s):
    client, _ = scripted
    run = await play(client, [ask("1")], time_limit_s=limit_s)
    assert [r.code for r in run.records] == ["OK"]


async def test_ready_wait_ends_in_time():
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(TimeoutError):
            await client.wait_ready(0.3)


# -- by hand -------------------------------------------------------------------------------------


def test_percentiles_interpolate_linearly():
    records = [record(0.0, ttft_s) for ttft_s in (0.1, 0.2, 0.3, 0.4, 0.5)]
    summary = latency_summary(records, ["ttft"], [50, 90, 99.5])
    assert summary["mean_ttft_ms"] == pytest.approx(300)
    assert summary["median_ttft_ms"] == pytest.approx(300)
    assert summary["std_ttft_ms"] == pytest.approx(100 * math.sqrt(2))
    assert summary["p50_ttft_ms"] == pytest.approx(300)
    assert summary["p90_ttft_ms"] == pytest.approx(460)
    assert summary["p99.5_ttft_ms"] == pytest.approx(498)


def test_latencies_by_hand():
    # Due at 1.0: first token at 1.4, then gaps of 0.1, 0.1 and 0.3.
    summary = latency_summary([record(1.0, 1.4, 1.5, 1.6, 1.9)])
    assert summary["mean_ttft_ms"] == pytest.approx(400)
    assert summary["mean_itl_ms"] == pytest.approx(500 / 3)
    assert summary["median_itl_ms"] == pytest.approx(100)
    assert summary["mean_tpot_ms"] == pytest.approx(500 / 3)
    assert summary["mean_e2el_ms"] == pytest.approx(900)


def test_violations_by_hand():
    records = [
        record(0.0, 0.2, 0.3, 0.5),  # first in time, one of two gaps late
        record(0.0, 0.4, 0.5),  # first late
        record(0.0, 0.1, 0.2, code="INTERNAL"),  # failed: its first token counts as late
        record(0.0, code="RESOURCE_EXHAUSTED"),
    ]
    late = violations(records, Slo(ttft_s=0.3, itl_s=0.15))
    assert late["ttft_violation_rate"] == pytest.approx(3 / 4)
    assert late["itl_violation_rate"] == pytest.approx(1 / 4)
    assert violations([], Slo(1, 1))["ttft_violation_rate"] is None


def test_late_shares_are_of_the_limits_there_are():
    records = [record(0.0, 0.2, 0.3, 0.5), record(0.0, 0.4, 0.5)]
    assert late_shares(records, {"ttft": 300.0, "e2el": 1.0}) == {"ttft_violation_rate": 0.5}
    assert late_shares(records, {"tpot": 150.0}) == {"itl_violation_rate": pytest.approx(1 / 3)}
    assert late_shares(records, {}) == {}


def test_thresholds_seen_span_all_requests():
    records = [
        record(0.0, 0.1, prefill_threshold=(40, 60), decode_threshold=(100, 100)),
        record(0.0, 0.1, prefill_threshold=(50, 80)),
    ]
    assert thresholds_seen(records) == {
        "prefill_threshold_percent": [40, 80],
        "decode_threshold_percent": [100, 100],
    }
    assert thresholds_seen([])["decode_threshold_percent"] is None


def test_summary_has_vllm_fields_and_goodput():
    records = [
        record(0.0, 0.2, 0.3, prompt_tokens=3, expert_visits=10, degraded_visits=2, correct=True),
        record(0.5, 1.5, 1.6, prompt_tokens=4, expert_visits=10, degraded_visits=1, correct=False),
        record(0.6, code="RESOURCE_EXHAUSTED", correct=False),
    ]
    run = Run(records, samples=[], duration_s=2.0, client_cpu_s=0.1)
    summary = summarize(run, percentiles=[99], goodput={"ttft": 500.0, "tpot": 200.0})
    assert summary["completed"] == 2
    assert summary["failed"] == 1
    assert summary["total_input_tokens"] == 7
    assert summary["total_output_tokens"] == 4
    assert summary["request_throughput"] == 1.0
    assert summary["request_goodput"] == 0.5
    assert summary["output_throughput"] == 2.0
    assert summary["total_token_throughput"] == 5.5
    assert summary["degraded_share"] == pytest.approx(3 / 20)
    assert summary["accuracy"] == 0.5  # of those answered
    assert summary["client_cpu_us_per_token"] == pytest.approx(25_000)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99")} <= set(summary)


def test_phases_split_by_when_requests_were_due():
    run = Run([record(0.5, 9.0), record(1.0, 1.1), record(2.0, 2.1)], [], 3.0, 0.0)
    assert [r.at_s for r in run.due(0, 1.0)] == [0.5]
    assert [r.at_s for r in run.due(1.0)] == [1.0, 2.0]
