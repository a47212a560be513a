"""Workloads: what to request, and when. Datasets, synthetic lengths, and Poisson arrivals."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from csv import DictReader
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import cycle, islice
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

BUNDLED_TASKS = Path(__file__).parents[2] / "jmoe" / "bundled" / "tasks.jsonl"
_MODELS = 1  # tells the stream of models from others of the same seed


class WorkloadError(ValueError):
    """A dataset file that cannot be used, or lengths and rates that make no sense."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload. Datasets leave `at_s` at 0; `schedule` sets it."""

    prompt: str | tuple[int, ...]  # text or token ids
    max_new_tokens: int
    answer: str | None = None  # the one right output, where there is one
    family: str = ""  # groups results
    ignore_eos: bool = False
    at_s: float = 0.0  # after the start of the run
    best_effort: bool = False
    model: str = ""  # of a family; "": the server's first
    temperature: float = 0.0


def approximate_tokens(text: str) -> int:
    """Estimates the tokens in `text` at four characters each, for a model whose tokenizer is not at
    hand.
    """
    return max(1, round(len(text) / 4))


# -- when ----------------------------------------------------------------------------------------


def poisson_times(num: int, rate_per_s: float, seed: int) -> list[float]:
    """Returns `num` arrival times in seconds with exponential gaps; all zero at an infinite
    rate.
    """
    return gamma_times(num, rate_per_s, 1.0, seed)


def gamma_times(
    num: int, rate_per_s: float | Sequence[float], burstiness: float, seed: int
) -> list[float]:
    """Returns `num` arrival times in seconds with gamma-distributed gaps of mean 1 / `rate_per_s`.

    `burstiness` is the distribution's shape: 1 is a Poisson process, less comes in bursts, more
    comes evenly, infinity at equal gaps. A sequence of rates gives every gap its own.
    """
    rates = np.asarray(rate_per_s, float)
    if num < 0 or not np.all(rates > 0):
        raise WorkloadError(f"{num} arrivals at {rate_per_s} a second; both must be positive")
    if not burstiness > 0:
        raise WorkloadError(f"burstiness is {burstiness:g}; it must be above 0")
    if math.isinf(burstiness):
        gaps = np.ones(num)
    else:
        gaps = np.random.default_rng(seed).standard_gamma(burstiness, num) / burstiness
    return list(map(float, np.cumsum(gaps / rates)))


def ramp_rates(strategy: str, start_per_s: float, end_per_s: float, num: int) -> list[float]:
    """Returns a rate for each of `num` requests, from `start_per_s` to `end_per_s`.

    `strategy` "linear" adds the same from request to request, "exponential" multiplies by the same.
    """
    between = np.linspace if strategy == "linear" else np.geomspace
    return list(map(float, between(start_per_s, end_per_s, num)))


def piecewise_poisson_times(pieces: Sequence[tuple[float, float]], seed: int) -> list[float]:
    """Returns arrival times in seconds of a Poisson process whose rate changes.

    `pieces` are (duration in seconds, rate per second), one after the other.
    """
    durations_s, rates = (np.array(column, float) for column in zip(*pieces, strict=True))
    if not (np.all(durations_s > 0) and np.all(rates > 0)):
        raise WorkloadError(f"durations and rates must be above 0: {list(pieces)}")
    ends_s = np.concatenate([[0.0], np.cumsum(durations_s)])
    expected = np.concatenate([[0.0], np.cumsum(durations_s * rates)])  # arrivals by then
    # A Poisson process of rate 1 read on the clock of expected arrivals has exactly these rates.
    rng = np.random.default_rng(seed)
    unit_times = np.cumsum(rng.exponential(size=int(expected[-1] + 10 * expected[-1] ** 0.5 + 20)))
    unit_times = unit_times[unit_times < expected[-1]]
    return list(map(float, np.interp(unit_times, expected, ends_s)))


def burst_pieces(
    duration_s: float, steady_rate_per_s: float, burst_rate_per_s: float, burst_at: float = 0.3
) -> list[tuple[float, float]]:
    """Returns the paper's shape: steady until `burst_at` of the time, then the burst to the end."""
    return [
        (duration_s * burst_at, steady_rate_per_s),
        (duration_s * (1 - burst_at), burst_rate_per_s),
    ]


def schedule(samples: Sequence[Arrival], times_s: Iterable[float]) -> list[Arrival]:
    """Schedules `samples` at `times_s`, from the beginning again when they run out."""
    return [
        replace(sample, at_s=at_s) for sample, at_s in zip(cycle(samples), times_s, strict=False)
    ]


def two_classes(arrivals: Sequence[Arrival], best_effort_share: float, seed: int) -> list[Arrival]:
    """Returns the same requests, each one best effort with a probability of `best_effort_share`."""
    best_effort = np.random.default_rng(seed).random(len(arrivals)) < best_effort_share
    return [
        replace(arrival, best_effort=bool(own))
        for arrival, own in zip(arrivals, best_effort, strict=True)
    ]


def several_models(
    arrivals: Sequence[Arrival], weights: Mapping[str, float], seed: int
) -> list[Arrival]:
    """Returns the same requests, each to a model that is drawn in proportion to its weight."""
    # A stream of its own: from the seed as it is, gaps between requests and classes are drawn.
    draws = np.random.default_rng([seed, _MODELS]).random(len(arrivals))
    ends = np.cumsum(list(weights.values()))
    names = list(weights)
    chosen = np.searchsorted(ends, draws * ends[-1], side="right")
    return [replace(a, model=names[i]) for a, i in zip(arrivals, chosen, strict=True)]


def shuffled(samples: Sequence[Arrival], seed: int, num: int | None = None) -> list[Arrival]:
    """Returns `samples` in a random order, repeated or cut to `num`."""
    order = np.random.default_rng(seed).permutation(len(samples))
    return list(islice(cycle([samples[i] for i in order]), len(samples) if num is None else num))


# -- what ----------------------------------------------------------------------------------------


def load_sharegpt(
    path: Path, count_tokens: Callable[[str], int] = approximate_tokens
) -> list[Arrival]:
    """Reads conversations: the first turn as prompt, and as many output tokens as the second turn
    has. Conversations of fewer than two turns and empty turns are left out.
    """
    pairs: list[tuple[str, str]] = []
    for number, row in enumerate(_json_list(path, "conversations")):
        turns = row["conversations"]
        if not isinstance(turns, list):
            raise WorkloadError(f'{path}: "conversations" of entry {number} is not a list')
        try:
            texts = [turn["value"] for turn in turns[:2]]
        except (TypeError, KeyError):
            raise WorkloadError(
                f'{path}: entry {number} has a turn that is not {{"from", "value"}}'
            ) from None
        if len(texts) == 2:
            pairs.append((texts[0], texts[1]))
    return _from_pairs(path, pairs, "sharegpt", count_tokens)


def load_alpaca(
    path: Path, count_tokens: Callable[[str], int] = approximate_tokens
) -> list[Arrival]:
    """Reads instruction and input as prompt, with as many output tokens as the output has."""
    pairs = [
        ("\n".join(filter(None, (row["instruction"], row.get("input", "")))), row["output"])
        for row in _json_list(path, "instruction", "output")
    ]
    return _from_pairs(path, pairs, "alpaca", count_tokens)


def load_tasks(path: Path) -> list[Arrival]:
    """Reads tasks with one right answer, from JSON lines of {"family", "prompt", "answer"}."""
    samples = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            family, prompt, answer = (str(row[key]) for key in ("family", "prompt", "answer"))
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise WorkloadError(
                f"{path}:{number} is not a JSON object with family, prompt and answer: {error!r}"
            ) from None
        if not _encodes(prompt) or not _encodes(answer):
            raise WorkloadError(f"{path}:{number} has half a surrogate pair, which is no text")
        # A token is at least a byte, so a right answer and its end-of-text token always fit.
        samples.append(Arrival(prompt, len(answer.encode()) + 1, answer, family))
    if not samples:
        raise WorkloadError(f"{path} holds no tasks")
    return samples


TRACES = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): "azure",
    ("Timestamp", "Request tokens", "Response tokens"): "burstgpt",
    ("timestamp", "input_length", "output_length"): "mooncake",
}
"""Columns of time and lengths, by which the published traces are known."""


def load_trace(path: Path, *, max_total_tokens: int = 2048) -> list[Arrival]:
    """Reads times and lengths of a trace: a CSV file of Azure or BurstGPT, or JSON lines of
    Mooncake. The first request is at 0 s, tokens are made up, and what is longer than
    `max_total_tokens` is cut.
    """
    lines = _read(path).splitlines()
    try:
        rows = [json.loads(line) for line in lines] if lines[0][0] == "{" else [*DictReader(lines)]
        columns = next(known for known in TRACES if set(known) <= set(rows[0]))
        found = [tuple(row[column] for column in columns) for row in rows]
        times_s = [_seconds(at, TRACES[columns]) for at, _, _ in found]
        lengths = [(max(1, int(context)), max(1, int(new))) for _, context, new in found]
    except (LookupError, StopIteration, ValueError, TypeError) as error:
        known = ", ".join(TRACES.values())
        raise WorkloadError(f"{path} is no trace of {known}: {error!r}") from None
    rng, samples, first_s = np.random.default_rng(0), [], min(times_s)
    for at_s, (context, new) in sorted(zip(times_s, lengths, strict=True)):
        new = min(new, max_total_tokens - 1)
        ids = tuple(rng.integers(3, 1 << 20, min(context, max_total_tokens - new)).tolist())
        samples.append(Arrival(ids, new, None, path.stem, ignore_eos=True, at_s=at_s - first_s))
    return samples


def _seconds(at: Any, kind: str) -> float:
    if kind == "azure":
        return datetime.fromisoformat(at).timestamp()
    return float(at) / (1000 if kind == "mooncake" else 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"cannot read the dataset {path}: {error}") from None


def _json_list(path: Path, *keys: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(_read(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise WorkloadError(f"{path} is not JSON: {error}") from None
    if not isinstance(rows, list):
        raise WorkloadError(f"{path} holds a JSON {type(rows).__name__}; a list is wanted")
    for number, row in enumerate(rows):
        missing = [key for key in keys if not isinstance(row, dict) or key not in row]
        if missing:
            raise WorkloadError(f"{path}: entry {number} lacks {', '.join(missing)}")
    return rows


def _from_pairs(
    path: Path,
    pairs: Iterable[tuple[str, str]],
    family: str,
    count_tokens: Callable[[str], int],
) -> list[Arrival]:
    samples = []
    for prompt, completion in pairs:
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise WorkloadError(f"{path}: a prompt or output is not text: {prompt!r:.80}")
        if not _encodes(prompt) or not _encodes(completion):
            continue  # half a surrogate pair: JSON has it, no wire does
        if prompt and completion:
            num_output = count_tokens(completion)
            samples.append(Arrival(prompt, num_output, family=family, ignore_eos=True))
    if not samples:
        raise WorkloadError(f"{path} holds no pair of prompt and output")
    return samples


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- synthetic lengths ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Mean prompt and output lengths in tokens, and the spread of their logarithm (0: fixed).

    With `range_ratio` r instead, each is drawn evenly from (1 - r) to (1 + r) times its mean.
    """

    mean_input_tokens: float
    mean_output_tokens: float
    sigma: float = 1.0
    range_ratio: float = 0.0


SHAREGPT_LENGTHS = Lengths(161, 338, 1.0)
ALPACA_LENGTHS = Lengths(37, 25, 0.7)


def lognormal_lengths(
    rng: np.random.Generator, num: int, mean: float, sigma: float, max_tokens: int
) -> np.ndarray:
    """Draws integer lengths in [1, max_tokens], lognormal, whose mean after clipping is `mean`."""
    if not 1 <= mean <= max_tokens or (sigma > 0 and mean > 0.8 * max_tokens):
        raise WorkloadError(
            f"a mean of {mean:g} tokens does not fit a limit of {max_tokens}: ask for shorter "
            "prompts and outputs, or serve with a larger max_model_len, which they share"
        )
    if sigma == 0:
        return np.full(num, round(mean))
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / 2000) for i in range(2000)])

    def clipped(mu: float, z: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(np.exp(mu + sigma * z)), 1, max_tokens)

    low, high = -10.0, float(np.log(max_tokens)) + 10 * sigma
    for _ in range(50):  # clipping moves the mean, so the location is searched, not computed
        middle = (low + high) / 2
        low, high = (middle, high) if clipped(middle, quantiles).mean() < mean else (low, middle)
    return clipped(low, rng.standard_normal(num)).astype(int)


def _even_lengths(rng: np.random.Generator, num: int, mean: float, ratio: float) -> np.ndarray:
    low, high = max(1, int(mean * (1 - ratio))), int(mean * (1 + ratio))
    return rng.integers(low, high, num, endpoint=True)


def synthetic(
    lengths: Lengths, num: int, *, seed: int, vocab_size: int, max_total_tokens: int = 2048
) -> list[Arrival]:
    """Makes requests of random token ids with `lengths`; outputs run to their full length.

    Prompt and output share `max_total_tokens` in the ratio of their means.
    """
    rng = np.random.default_rng(seed)
    mean_total = lengths.mean_input_tokens + lengths.mean_output_tokens
    max_input = int(max_total_tokens * lengths.mean_input_tokens / mean_total)
    inputs, outputs = (
        lognormal_lengths(rng, num, mean, lengths.sigma, limit)
        if not lengths.range_ratio
        else _even_lengths(rng, num, mean, lengths.range_ratio)
        for mean, limit in (
            (lengths.mean_input_tokens, max_input),
            (lengths.mean_output_tokens, max_total_tokens - max_input),
        )
    )
    first = min(3, vocab_size - 1)  # the lowest ids are often special tokens
    return [
        Arrival(
            tuple(map(int, rng.integers(first, vocab_size, num_input))),
            int(num_output),
            family="synthetic",
            ignore_eos=True,
        )
        for num_input, num_output in zip(inputs, outputs, strict=True)
    ]
