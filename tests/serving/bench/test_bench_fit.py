"""`jmoe bench serve` fits what no flag says to the server it meets."""

import json
import math

import pytest

from serving.bench.config import BenchConfig, prepare
from serving.bench.fit import fit
from serving.bench.workload import WorkloadError
from serving.proto.jmoe.v1 import jmoe_pb2 as pb


def fitted(max_model_len=256, **change):
    server = pb.ServerInfo(max_model_len=max_model_len, max_num_seqs=36, max_queue_len=512)
    return fit(prepare(BenchConfig(**change)), server, vocab_size=100)


@pytest.mark.parametrize(
    ("max_model_len", "change", "lengths"),
    [
        (4096, {}, (1024, 128)),
        (1152, {}, (1024, 128)),
        (256, {}, (228, 28)),
        (2, {}, (1, 1)),
        (256, {"random_input_len": 200}, (200, 56)),
        (256, {"random_output_len": 200}, (56, 200)),
        (4096, {"random_output_len": 200}, (1024, 200)),
    ],
)
def test_random_lengths_that_no_flag_gives_are_fitted(max_model_len, change, lengths):
    (arrival,), _ = fitted(max_model_len, num_prompts=1, **change)
    assert (len(arrival.prompt), arrival.max_new_tokens) == lengths


@pytest.mark.parametrize(("max_model_len", "given"), [(256, {}), (400, {"random_input_len": 200})])
def test_random_lengths_within_a_ratio_are_even_and_fit(max_model_len, given):
    arrivals, words = fitted(max_model_len, num_prompts=500, random_range_ratio=0.3, **given)
    inputs = [len(a.prompt) for a in arrivals]
    mean = 200 if given else 175  # 1024 / 1152 of what 1.3 times fits in
    assert (min(inputs), max(inputs)) == (int(0.7 * mean), int(1.3 * mean))
    assert sum(inputs) / 500 == pytest.approx(mean, rel=0.04)
    assert all(len(a.prompt) + a.max_new_tokens <= max_model_len for a in arrivals)
    assert "each 0.7 to 1.3 times that" in words


def test_random_lengths_that_only_fit_without_a_ratio_are_refused():
    fitted(256, random_input_len=200, random_output_len=50)
    with pytest.raises(WorkloadError, match=r"1\.1 times that; the server's max_model_len is 256"):
        fitted(256, random_input_len=200, random_output_len=50, random_range_ratio=0.1)


@pytest.mark.parametrize("name", ["sharegpt", "alpaca"])
@pytest.mark.parametrize("max_model_len", [32, 64, 256, 2048])
def test_lengths_like_a_datasets_are_fitted(name, max_model_len):
    arrivals, words = fitted(max_model_len, dataset_name=name)
    assert all(len(a.prompt) + a.max_new_tokens <= max_model_len for a in arrivals)
    shortened = {"sharegpt": 2048, "alpaca": 256}[name] > max_model_len
    assert ("shortened" in words) == shortened


def test_requests_are_as_many_as_the_server_takes_at_once():
    assert len(fitted()[0]) == 548
    assert len(fitted(request_rate=5.0)[0]) == 1000
    assert len(fitted(max_concurrency=36)[0]) == 1000
    assert len(fitted(num_prompts=548)[0]) == 548


def test_pairs_that_do_not_fit_are_left_out(tmp_path):
    path = tmp_path / "alpaca.json"
    path.write_text(
        json.dumps([{"instruction": "a" * 4 * n, "output": "b" * 40} for n in (5, 246, 247, 999)])
    )
    source = {"dataset_name": "alpaca", "dataset_path": path}
    arrivals, words = fitted(num_prompts=4, **source)
    assert sorted(len(a.prompt) for a in arrivals) == [20, 20, 984, 984]
    assert "four characters" in words
    with pytest.raises(WorkloadError, match="max_model_len of 14"):
        fitted(14, **source)


def test_a_ramp_goes_from_its_first_rate_to_its_last():
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 4.0}
    arrivals, _ = fitted(num_prompts=4, burstiness=math.inf, **ramp)
    assert [a.at_s for a in arrivals] == pytest.approx([1, 3 / 2, 11 / 6, 25 / 12])


def test_the_bundled_tasks_are_there():
    arrivals, words = fitted(dataset_name="tasks", num_prompts=3)
    assert words == "3 requests: the bundled tasks"
    assert all(isinstance(a.prompt, str) and a.answer is not None for a in arrivals)
