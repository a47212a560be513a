import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.bench.workload import (
    ALPACA_LENGTHS,
    SHAREGPT_LENGTHS,
    Arrival,
    WorkloadError,
    burst_pieces,
    gamma_times,
    load_alpaca,
    load_sharegpt,
    load_tasks,
    load_trace,
    piecewise_poisson_times,
    poisson_times,
    ramp_rates,
    schedule,
    several_models,
    shuffled,
    synthetic,
)


def ks_distance_to_exponential(gaps_s, rate_per_s):
    gaps_s = np.sort(gaps_s)
    expected = 1 - np.exp(-gaps_s * rate_per_s)
    steps = np.arange(len(gaps_s) + 1) / len(gaps_s)
    return max(np.max(steps[1:] - expected), np.max(expected - steps[:-1]))


def test_gaps_are_exponential():
    times_s = poisson_times(20_000, rate_per_s=8.0, seed=3)
    gaps_s = np.diff([0.0, *times_s])
    assert gaps_s.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps_s.var() == pytest.approx(1 / 64, rel=0.06)
    assert ks_distance_to_exponential(gaps_s, 8.0) < 1.36 / math.sqrt(len(gaps_s))


def test_counts_of_equal_windows_vary_as_poisson_counts_do():
    times_s = np.array(poisson_times(50_000, rate_per_s=10.0, seed=5))
    counts = np.histogram(times_s, bins=np.arange(0, 4900, 1.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.07)


def test_times_repeat_with_the_seed_and_only_then():
    assert poisson_times(50, 2.0, seed=1) == poisson_times(50, 2.0, seed=1)
    assert poisson_times(50, 2.0, seed=1) != poisson_times(50, 2.0, seed=2)
    assert poisson_times(3, math.inf, seed=1) == [0.0, 0.0, 0.0]


@pytest.mark.deep
@settings(max_examples=30)
@given(
    weights=st.dictionaries(st.text(min_size=1), st.floats(0.01, 100), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_models_are_drawn_by_weight_and_seed(weights, seed):
    arrivals = [Arrival(str(i), 1, at_s=i) for i in range(4000)]
    mixed = several_models(arrivals, weights, seed)
    assert [replace(a, model="") for a in mixed] == arrivals
    assert mixed == several_models(arrivals, weights, seed)
    total = sum(weights.values())
    for name, weight in weights.items():
        share = sum(a.model == name for a in mixed) / len(mixed)
        assert share == pytest.approx(weight / total, abs=0.05)  # six standard deviations
    assert {a.model for a in mixed} <= set(weights)


def test_models_do_not_go_with_the_gaps_between_requests():
    gaps_s = np.diff([0.0, *poisson_times(20_000, 1.0, seed=7)])
    mixed = several_models([Arrival("", 1)] * 20_000, {"a": 1, "b": 1}, seed=7)
    of_a = np.array([a.model == "a" for a in mixed])
    assert gaps_s[of_a].mean() == pytest.approx(gaps_s[~of_a].mean(), rel=0.06)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness):
    gaps_s = np.diff([0.0, *gamma_times(40_000, 8.0, burstiness, seed=3)])
    assert gaps_s.mean() == pytest.approx(1 / 8, rel=0.03)
    # A gamma distribution of shape k has a variance of mean^2 / k and a skewness of 2 / sqrt(k).
    assert gaps_s.var() == pytest.approx(1 / 64 / burstiness, rel=0.06)
    skewness = np.mean((gaps_s - gaps_s.mean()) ** 3) / gaps_s.std() ** 3
    assert skewness == pytest.approx(2 / math.sqrt(burstiness), rel=0.1)


def test_extremes_of_burstiness():
    assert gamma_times(3, 2.0, math.inf, seed=1) == [0.5, 1.0, 1.5]
    assert gamma_times(3, math.inf, 0.5, seed=1) == [0.0, 0.0, 0.0]
    assert gamma_times(9, 2.0, 1.0, seed=1) == poisson_times(9, 2.0, seed=1)
    with pytest.raises(WorkloadError, match="burstiness is 0"):
        gamma_times(3, 2.0, 0.0, seed=1)


def test_every_gap_may_have_its_own_rate():
    assert gamma_times(3, [1.0, 2.0, 4.0], math.inf, seed=1) == [1.0, 1.5, 1.75]
    assert ramp_rates("linear", 1.0, 9.0, 5) == pytest.approx([1, 3, 5, 7, 9])
    assert ramp_rates("exponential", 1.0, 16.0, 5) == pytest.approx([1, 2, 4, 8, 16])


def test_burst_has_both_rates():
    pieces = burst_pieces(1000.0, 20.0, 40.0)
    times_s = np.array(piecewise_poisson_times(pieces, seed=4))
    steady, burst = times_s[times_s < 300], times_s[times_s >= 300]
    assert abs(len(steady) - 6000) < 4 * math.sqrt(6000)
    assert abs(len(burst) - 28_000) < 4 * math.sqrt(28_000)
    assert times_s[-1] < 1000
    assert ks_distance_to_exponential(np.diff(burst), 40.0) < 1.36 / math.sqrt(len(burst))
    assert all(a < b for a, b in pairwise(times_s))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_rates_must_be_positive(rate):
    with pytest.raises(WorkloadError):
        poisson_times(3, rate, seed=0)
    with pytest.raises(WorkloadError):
        piecewise_poisson_times([(10.0, rate)], seed=0)


@pytest.mark.parametrize("lengths", [SHAREGPT_LENGTHS, ALPACA_LENGTHS])
def test_synthetic_lengths_have_the_papers_means_and_a_long_tail(lengths):
    samples = synthetic(lengths, 20_000, seed=0, vocab_size=100)
    inputs = np.array([len(s.prompt) for s in samples])
    outputs = np.array([s.max_new_tokens for s in samples])
    assert inputs.mean() == pytest.approx(lengths.mean_input_tokens, rel=0.03)
    assert outputs.mean() == pytest.approx(lengths.mean_output_tokens, rel=0.03)
    assert np.median(outputs) < 0.85 * outputs.mean()
    assert (inputs + outputs).max() <= 2048
    assert min(inputs.min(), outputs.min()) >= 1
    assert all(s.ignore_eos for s in samples)
    assert {t for s in samples[:50] for t in s.prompt} <= set(range(3, 100))


def test_synthetic_lengths_that_do_not_fit_are_an_error():
    with pytest.raises(WorkloadError, match="does not fit"):
        synthetic(SHAREGPT_LENGTHS, 10, seed=0, vocab_size=100, max_total_tokens=300)


def write(tmp_path, content):
    path = tmp_path / "data.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_sharegpt_takes_the_first_two_turns(tmp_path):
    turns = [("human", "a" * 40), ("gpt", "b" * 80), ("human", "more")]
    rows = [
        {"conversations": [{"from": who, "value": text} for who, text in turns]},
        {"conversations": [{"from": "human", "value": "alone"}]},
    ]
    (sample,) = load_sharegpt(write(tmp_path, rows))
    assert sample == Arrival("a" * 40, 20, family="sharegpt", ignore_eos=True)
    (counted,) = load_sharegpt(write(tmp_path, rows), count_tokens=len)
    assert counted.max_new_tokens == 80


def test_alpaca_joins_instruction_and_input(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3333"},
        {"instruction": "Say hi.", "input": "", "output": "hi hi hi"},
    ]
    samples = load_alpaca(write(tmp_path, rows))
    assert [s.prompt for s in samples] == ["Add.\n1 2", "Say hi."]
    assert [s.max_new_tokens for s in samples] == [1, 2]


@pytest.mark.parametrize(
    ("load", "content", "message"),
    [
        (load_sharegpt, "nonsense", "not JSON"),
        (load_sharegpt, {"a": 1}, "holds a JSON dict"),
        (load_sharegpt, [{"instruction": "x", "output": "y"}], "entry 0 lacks conversations"),
        (load_sharegpt, [{"conversations": [{"text": "x"}, {}]}], "entry 0 has a turn"),
        (load_sharegpt, [{"conversations": "x"}], "not a list"),
        (load_sharegpt, [{"conversations": []}], "no pair"),
        (load_alpaca, [{"instruction": "x"}], "lacks output"),
        (load_alpaca, [["x"]], "lacks instruction"),
        (load_alpaca, [{"instruction": "x", "output": 3}], "not text"),
        (load_tasks, '{"family": "f", "prompt": "p"}\n', ":1 is not a JSON object"),
        (load_tasks, "[1]", ":1 is not a JSON object"),
        (load_tasks, "\n", "no tasks"),
        (load_tasks, '{"family": "f", "prompt": "\\ud83d", "answer": "a"}', ":1 has half"),
        (load_sharegpt, "[" * 100_000, "not JSON"),
    ],
)
def test_wrong_files_are_named_with_the_reason(tmp_path, load, content, message):
    path = write(tmp_path, content)
    with pytest.raises(WorkloadError, match=message) as error:
        load(path)
    assert "data.json" in str(error.value)


def test_a_pair_that_is_no_text_is_left_out(tmp_path):
    rows = [{"instruction": text, "output": "y"} for text in ("bad \ud83d half", "good")]
    (sample,) = load_alpaca(write(tmp_path, rows))
    assert sample.prompt == "good"


def test_a_missing_file_is_a_workload_error(tmp_path):
    with pytest.raises(WorkloadError, match="cannot read"):
        load_tasks(tmp_path / "none.jsonl")


def test_tasks_leave_room_for_the_answer(tmp_path):
    row = {"family": "sum", "prompt": "1+1=", "answer": " zwölf"}
    (sample,) = load_tasks(write(tmp_path, json.dumps(row) + "\n\n"))
    assert sample == Arrival("1+1=", 8, " zwölf", "sum")


def test_schedule_repeats_samples_and_shuffle_keeps_them():
    samples = [Arrival(str(i), 1) for i in range(3)]
    arrivals = schedule(samples, [0.5, 1.0, 1.5, 2.0])
    assert [(a.prompt, a.at_s) for a in arrivals] == [
        ("0", 0.5), ("1", 1.0), ("2", 1.5), ("0", 2.0),
    ]  # fmt: skip
    mixed = shuffled(samples, seed=1, num=6)
    assert sorted(a.prompt for a in mixed[:3]) == ["0", "1", "2"]
    assert mixed[3:] == mixed[:3]


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,40,5\n2023-11-16 18:17:05.4799600,4000,500\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,40,5,45,Conversation log\n6.5,GPT-4,4000,500,4500,API log\n",
        '{"timestamp": 27482, "input_length": 40, "output_length": 5, "hash_ids": [0]}\n'
        '{"timestamp": 28982, "input_length": 4000, "output_length": 500, "hash_ids": []}\n',
    ],
    ids=["azure", "burstgpt", "mooncake"],
)
def test_published_traces_are_read(text, tmp_path):
    path = tmp_path / "trace"
    path.write_text(text)
    first, second = load_trace(path, max_total_tokens=1000)
    assert (first.at_s, second.at_s) == (0, pytest.approx(1.5))
    assert (len(first.prompt), first.max_new_tokens) == (40, 5)
    assert (len(second.prompt), second.max_new_tokens) == (500, 500)  # cut to 1000 in all


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "{\n"])
def test_a_file_that_is_no_trace_is_named(text, tmp_path):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(WorkloadError, match="is no trace of azure, burstgpt, mooncake"):
        load_trace(path)
