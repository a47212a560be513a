"""Fits a benchmark to the server it meets: how many requests, and how long they are.

What a flag says is kept or refused; what no flag says is made to fit.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice

from serving.bench import workload
from serving.bench.config import BenchConfig, Dataset, LoadPlan
from serving.bench.workload import Arrival, Lengths, WorkloadError
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 1000, 1024, 128  # vLLM's


def fit(plan: LoadPlan, server: pb.ServerInfo, vocab_size: int) -> tuple[list[Arrival], str]:
    """Returns what `plan` plays against this server, and a line that describes it. Raises
    WorkloadError for what does not fit.
    """
    config, limit = plan.config, server.max_model_len
    num = _num_prompts(config, server)
    if plan.dataset is not None:
        samples = list(islice(cycle(_fitting(plan.dataset, limit)), num))
        words = _words(config, plan.dataset, limit)
    else:
        lengths, words = _lengths(config, limit)
        samples = workload.synthetic(
            lengths, num, seed=config.seed, vocab_size=vocab_size, max_total_tokens=limit
        )
    if num < NUM_PROMPTS and config.num_prompts is None:
        words += f"; the server takes no more at once than {_places(server)}"
    arrivals = workload.schedule(samples, _times_s(config, num))
    if config.best_effort_share:
        arrivals = workload.two_classes(arrivals, config.best_effort_share, config.seed)
        words += f"; {sum(a.best_effort for a in arrivals)} of them best effort"
    if plan.model_mix:
        arrivals = workload.several_models(arrivals, plan.model_mix, config.seed)
        asked = Counter(a.model for a in arrivals)
        words += f"; {', '.join(f'{asked[name]} to {name}' for name in plan.model_mix)}"
    if config.ignore_eos or config.temperature:
        arrivals = [
            replace(a, ignore_eos=a.ignore_eos or config.ignore_eos, temperature=config.temperature)
            for a in arrivals
        ]
    return arrivals, f"{num} requests: {words}"


def _times_s(config: BenchConfig, num: int) -> list[float]:
    rate = config.request_rate
    if config.ramp_up_strategy is not None:
        assert config.ramp_up_start_rps is not None
        assert config.ramp_up_end_rps is not None
        start, end = config.ramp_up_start_rps, config.ramp_up_end_rps
        rate = workload.ramp_rates(config.ramp_up_strategy, start, end, num)
    return workload.gamma_times(num, rate, config.burstiness, config.seed)


# -- how many ------------------------------------------------------------------------------------


def _num_prompts(config: BenchConfig, server: pb.ServerInfo) -> int:
    num = NUM_PROMPTS if config.num_prompts is None else config.num_prompts
    all_at_once = math.isinf(config.request_rate) and config.ramp_up_strategy is None
    room = server.max_num_seqs + server.max_queue_len
    if not all_at_once or not server.max_queue_len:
        return num
    if config.max_concurrency is None and config.num_prompts is None:
        return min(num, room)
    if config.max_concurrency is None and num > room:
        raise WorkloadError(
            f"--num-prompts is {num}, all at once; the server takes {room} ({_places(server)}): "
            f"add --max-concurrency {room} or a --request-rate"
        )
    if config.max_concurrency is not None and min(num, config.max_concurrency) > room:
        raise WorkloadError(
            f"--max-concurrency is {config.max_concurrency}; the server takes {room} "
            f"({_places(server)})"
        )
    return num


def _places(server: pb.ServerInfo) -> str:
    return f"{server.max_num_seqs} running and {server.max_queue_len} waiting"


# -- from a file ---------------------------------------------------------------------------------


def _fitting(dataset: Dataset, limit: int) -> Iterator[Arrival]:
    """Yields samples whose prompt and output fit, in order. Raises WorkloadError when none does."""
    found = False
    for sample in dataset.samples:
        assert isinstance(sample.prompt, str)
        counted = sample.answer is None  # tasks are short, and four characters may be four tokens
        num_prompt = dataset.count_tokens(sample.prompt) if counted else 0
        if num_prompt + sample.max_new_tokens <= limit:
            found = True
            yield sample
    if not found:
        raise WorkloadError(
            f"no prompt of the dataset and its output fit the server's max_model_len of {limit}"
        )


def _words(config: BenchConfig, dataset: Dataset, limit: int) -> str:
    source = config.dataset_path or "the bundled tasks"
    if config.dataset_name == "tasks":
        return f"{source}"
    counted = ""
    if dataset.count_tokens is workload.approximate_tokens:
        counted = ", taken as four characters each (--tokenizer counts them)"
    return f"those of {source} that fit max_model_len, {limit} tokens{counted}"


# -- drawn ---------------------------------------------------------------------------------------


def _lengths(config: BenchConfig, limit: int) -> tuple[Lengths, str]:
    if config.dataset_name == "random":
        return _fixed_lengths(config, limit)
    like_sharegpt = config.dataset_name == "sharegpt"
    usual = workload.SHAREGPT_LENGTHS if like_sharegpt else workload.ALPACA_LENGTHS
    mean_total = usual.mean_input_tokens + usual.mean_output_tokens
    words = f"random tokens, lengths spread as {config.dataset_name}'s are"
    if 0.75 * limit >= mean_total:
        return usual, words
    shrink = 0.5 * limit / mean_total  # half of the limit leaves room for the long ones
    lengths = replace(
        usual,
        mean_input_tokens=max(1.0, usual.mean_input_tokens * shrink),
        mean_output_tokens=max(1.0, usual.mean_output_tokens * shrink),
    )
    return lengths, (
        f"{words}, means shortened to {lengths.mean_input_tokens:.0f} in and "
        f"{lengths.mean_output_tokens:.0f} out to fit max_model_len, {limit}"
    )


def _fixed_lengths(config: BenchConfig, limit: int) -> tuple[Lengths, str]:
    num_input, num_output = config.random_input_len, config.random_output_len
    ratio, server_limit = config.random_range_ratio, limit
    limit = int(limit / (1 + ratio))  # of the mean
    given = [
        f"{flag} {num}"
        for flag, num in (("--random-input-len", num_input), ("--random-output-len", num_output))
        if num is not None
    ]
    if num_output is None:
        share = limit * OUTPUT_LEN // (INPUT_LEN + OUTPUT_LEN)
        num_output = max(1, min(OUTPUT_LEN, share if num_input is None else limit - num_input))
    if num_input is None:
        num_input = max(1, min(INPUT_LEN, limit - num_output))
    if num_input + num_output > limit:
        times = f", {1 + ratio:g} times that" if ratio else ""
        raise WorkloadError(
            f"{' and '.join(given)} {'make' if len(given) == 2 else 'makes'} at least "
            f"{num_input + num_output} tokens a request{times}"
            f"; the server's max_model_len is {server_limit}"
        )
    words = f"{num_input} random tokens in, {num_output} out (max_model_len {server_limit})"
    if ratio:
        words += f", each {1 - ratio:g} to {1 + ratio:g} times that"
    return Lengths(num_input, num_output, sigma=0, range_ratio=ratio), words
