import asyncio
import json
import math
from pathlib import Path

import pytest
import scripted_server

from serving.calibrate import Calibration, FullBatch, calibrate, full_batch
from serving.client import Client
from serving.loadgen import BenchConfig, play, run_bench, saturate
from serving.results import (
    Record,
    Run,
    Slo,
    latency_summary,
    quality,
    summarize,
    violations,
)
from serving.workload import Arrival, WorkloadError

SLACK_S = 0.25  # a busy machine wakes late, never early


@pytest.fixture
async def scripted():
    server, servicer, address = await scripted_server.start()
    async with Client(address) as client:
        yield client, servicer
    await server.stop(None)


def ask(script, at_s=0.0, answer=None, family="f"):
    return Arrival(script, 16, answer, family, at_s=at_s)


def record(at_s, *token_s, code="OK", **more):
    end_s = token_s[-1] if token_s else at_s
    return Record("f", at_s, sent_s=at_s, token_s=list(token_s), end_s=end_s, code=code, **more)


# -- against a server ----------------------------------------------------------------------------


async def test_times_are_those_of_the_script(scripted):
    client, servicer = scripted
    run = await play(client, [ask("100,50,50", at_s=0.05, answer=" xxx\n")], time_limit_s=5)
    (measured,) = run.records
    assert 0.1 <= measured.ttft_s < 0.1 + SLACK_S
    assert len(measured.itls_s) == 2
    assert 0.1 - 0.01 <= sum(measured.itls_s) < 0.1 + SLACK_S
    assert measured.tpot_s == pytest.approx(sum(measured.itls_s) / 2)
    assert measured.e2el_s >= measured.ttft_s + sum(measured.itls_s)
    assert measured.correct
    assert (measured.text, measured.finish_reason) == ("xxx", "stop")
    assert (measured.expert_visits, measured.degraded_visits) == (30, 0)
    assert measured.decode_threshold == (100, 100)
    assert servicer.requests[0].sampling.max_new_tokens == 16


async def test_load_is_open_and_latency_counts_from_the_schedule():
    server, _, address = await scripted_server.start(slots=1)
    async with Client(address) as client:
        run = await play(client, [ask("100") for _ in range(3)], time_limit_s=5)
    await server.stop(None)
    assert all(r.sent_s < 0.1 for r in run.records)
    for ttft_s, expected_s in zip(
        sorted(r.ttft_s for r in run.records), (0.1, 0.2, 0.3), strict=True
    ):
        assert expected_s <= ttft_s < expected_s + SLACK_S


async def test_failures_are_recorded_and_late(scripted):
    client, _ = scripted
    scripts = ["10,10", "refuse", "10,die", "10,cancel", "hang", ""]
    run = await play(client, [ask(s, answer="xx") for s in scripts], time_limit_s=0.6)
    codes = {r.code for r in run.records}
    by_code = {r.code: r for r in run.records if not r.ok}
    assert codes == {"OK", "RESOURCE_EXHAUSTED", "INTERNAL", "CANCELLED", "DEADLINE_EXCEEDED"}
    assert by_code["RESOURCE_EXHAUSTED"].error == "queue is full"
    assert len(by_code["INTERNAL"].token_s) == 1
    assert run.duration_s < 3
    late = violations(run.records, Slo(ttft_s=0.5, itl_s=0.5))
    assert (late["first_tokens"], late["late_first_tokens"]) == (6, 4)
    assert (late["other_tokens"], late["late_other_tokens"]) == (1, 0)
    # Of the two that were answered, the empty one is wrong.
    assert quality(run.records)["accuracy"] == 0.5
    assert summarize(run)["failures"]["INTERNAL"] == 1


async def test_what_is_due_after_the_time_limit_fails_unsent(scripted):
    client, servicer = scripted
    run = await play(client, [ask("1"), ask("1", at_s=0.3)], time_limit_s=0.2)
    assert [r.code for r in run.records] == ["OK", "DEADLINE_EXCEEDED"]
    assert len(servicer.requests) == 1


async def test_concurrency_limit_defers_when_a_request_is_due(scripted):
    client, _ = scripted
    run = await play(client, [ask("60") for _ in range(6)], time_limit_s=5, max_concurrency=2)
    assert all(0.06 <= r.ttft_s < 0.06 + SLACK_S for r in run.records)
    assert run.duration_s >= 0.18


async def test_samples_follow_the_brownout_state(scripted):
    client, _ = scripted
    seen = []

    async def change():
        await asyncio.sleep(0.2)
        state = await client.set_brownout(salc_enabled=True, ttft_slo_s=0.5)
        assert (state.salc_enabled, state.ttft_slo_s) == (True, 0.5)

    task = asyncio.create_task(change())
    run = await play(
        client, [ask("600")], time_limit_s=5, sample_every_s=0.1, on_sample=seen.append
    )
    await task
    thresholds = [s.decode_threshold_percent for s in run.samples]
    assert thresholds[0] == 100
    assert thresholds[-1] == 20
    assert 3 <= len(run.samples) <= 8
    assert run.samples[1].num_running == 1
    assert run.samples[0].itl_p90_s is None
    assert seen == run.samples


async def test_saturation_keeps_the_batch_full_and_measures_capacity(scripted):
    client, servicer = scripted
    scripts = [ask("20,20"), ask("20,20,20,20")] * 500
    run = await saturate(client, scripts, concurrency=4, duration_s=1.0)
    # 4 requests at a time, 3 tokens on average, a token every 20 ms and some: at most 66 a second.
    measured = full_batch(run, 0.2, 1.0)
    assert 0.2 * 66 < measured.capacity_per_s <= 67
    assert 0.019 <= measured.itl_p90_s < 0.2
    assert len(run.records) == len(servicer.requests)
    assert all(r.ok for r in run.records)


async def test_calibration_does_not_take_a_machine_held_up_for_a_slow_one(scripted):
    client, servicer = scripted
    said = []

    def say(text):
        said.append(text)
        servicer.slowness = 5.0 if len(said) in (2, 5) else 1.0  # the first zero, the last full

    found = await calibrate(client, [ask("20,20")] * 13, window_s=0.6, say=say)
    # 4 requests at a time, a token every 20 ms, or every 10 at threshold 0; 100 and 50 held up.
    assert ["no brownout" in text for text in said] == [True, True, False, True, False]
    assert 30 < found.zero.capacity_per_s < 101
    assert found.zero.itl_p90_s < 0.09
    assert found.full.itl_p90_s < 0.045


@pytest.mark.parametrize(
    ("full_ttft_s", "expected_s"), [(0.010, 0.030), (0.025, 0.050), (math.nan, 0.030)]
)
def test_the_ttft_objective_leaves_a_full_batch_room(full_ttft_s, expected_s):
    zero, full = FullBatch(0.040, 0.020, 100.0), FullBatch(full_ttft_s, 0.005, 150.0)
    slo = Calibration(0.010, zero, full).slo
    assert (slo.ttft_s, slo.itl_s) == (pytest.approx(expected_s), pytest.approx(0.010))


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


# -- jmoe bench serve ----------------------------------------------------------------------------


async def bench(config):
    return await asyncio.to_thread(run_bench, config)


async def test_bench_writes_what_it_returns(tmp_path):
    server, servicer, address = await scripted_server.start()
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"family": "f", "prompt": "5,5", "answer": "xx"}) + "\n")
    result = await bench(
        BenchConfig(
            port=int(address.rpartition(":")[2]),
            dataset_name="tasks",
            dataset_path=tasks,
            num_prompts=10,
            request_rate=100.0,
            goodput=("ttft:1000",),
            save_detailed=True,
            result_dir=tmp_path,
            result_filename="result.json",
        )
    )
    await server.stop(None)
    assert (result["completed"], result["accuracy"], len(servicer.requests)) == (10, 1.0, 10)
    assert result["request_goodput"] == result["request_throughput"]
    assert result["output_lens"] == [2] * 10
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert "p99_ttft_ms" in result
    assert "mean_e2el_ms" not in result  # as vLLM's default has it


async def test_bench_draws_token_prompts_within_the_models_vocabulary(tmp_path):
    server, servicer, address = await scripted_server.start()
    config = BenchConfig(
        port=int(address.rpartition(":")[2]),
        num_prompts=4,
        random_input_len=20,
        random_output_len=9,
    )
    assert (await bench(config))["completed"] == 4
    await server.stop(None)
    assert all(len(r.tokens.ids) == 20 and max(r.tokens.ids) < 50 for r in servicer.requests)
    assert all(r.sampling.max_new_tokens == 9 for r in servicer.requests)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"burstiness": 2.0}, "Poisson"),
        ({"percentile_metrics": "ttft,speed"}, "speed"),
        ({"goodput": ("ttft:soon",)}, "METRIC:MILLISECONDS"),
        ({"goodput": ("itl:3",)}, "not 'itl'"),
        ({"metric_percentiles": "50,101"}, "has 101; they are between 0 and 100"),
        ({"metric_percentiles": "abc"}, "'abc' is not numbers"),
        ({"save_result": True, "result_dir": Path("/proc/x")}, "results cannot go to /proc/x"),
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"time_limit_s": 0.0}, "time_limit_s is 0.0"),
        ({"dataset_path": Path("x.json")}, "dataset_name random reads none"),
    ],
)
def test_bench_settings_are_checked_first(change, message):
    with pytest.raises(WorkloadError, match=message):
        run_bench(BenchConfig(**change))
