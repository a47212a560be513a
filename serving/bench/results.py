"""What a load run measured, and what follows from it: latencies, violations, accuracy. No jax."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(slots=True)
class Record:
    """The outcome of one request. Times are seconds after the start of the run."""

    family: str
    at_s: float  # when it was due; TTFT and E2EL count from here
    sent_s: float = math.nan
    end_s: float = math.nan
    token_s: list[float] = field(default_factory=list)  # arrival of each token
    text: str = ""
    finish_reason: str = ""
    code: str = "OK"  # gRPC status
    error: str = ""
    correct: bool | None = None  # None: no right answer is known
    prompt_tokens: int = 0
    expert_visits: int = 0
    degraded_visits: int = 0
    prefill_threshold: tuple[int, int] | None = None  # smallest and largest percent seen
    decode_threshold: tuple[int, int] | None = None
    best_effort: bool = False
    model: str = ""  # that was asked; "": the server's first

    @property
    def ok(self) -> bool:
        """Whether it was answered to the end."""
        return self.code == "OK"

    @property
    def ttft_s(self) -> float:
        """Time to first token; to the end where the answer is empty; infinite without either."""
        first_s = self.token_s[0] if self.token_s else self.end_s if self.ok else math.inf
        return first_s - self.at_s

    @property
    def itls_s(self) -> list[float]:
        """Gaps between tokens. Tokens of one message arrive together, so their gaps are 0."""
        return [b - a for a, b in itertools.pairwise(self.token_s)]

    @property
    def tpot_s(self) -> float | None:
        """Mean gap; None with fewer than two tokens."""
        gaps = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / gaps if gaps > 0 else None

    @property
    def e2el_s(self) -> float:
        """Time from when the request was due to the end of its answer."""
        return self.end_s - self.at_s


@dataclass(frozen=True)
class Sample:
    """Server state at one moment. Thresholds in percent; P90s are the controllers' own."""

    at_s: float
    prefill_threshold_percent: float
    decode_threshold_percent: float
    ttft_p90_s: float | None
    itl_p90_s: float | None
    predicted_ttft_p90_s: float | None  # that the controller expected of its thresholds
    predicted_itl_p90_s: float | None
    num_running: int
    num_waiting: int
    expert_visits: int
    degraded_visits: int
    full_decode_step_s: float | None = None  # that the server expects without brownout


@dataclass
class Run:
    """Everything measured while a workload was played."""

    records: list[Record]
    samples: list[Sample]
    duration_s: float
    client_cpu_s: float
    """Processor time of this process: the generator's own cost; NaN where simulated."""

    def due(self, start_s: float, end_s: float = math.inf) -> list[Record]:
        """Returns the requests that were due in [start_s, end_s)."""
        return [r for r in self.records if start_s <= r.at_s < end_s]


@dataclass(frozen=True)
class Slo:
    """Latency objectives in seconds: the first token, and every gap after it."""

    ttft_s: float
    itl_s: float


def rounded(value: Any, digits: int) -> Any:
    """Returns a value of JSON with floats rounded to so many digits; NaN and infinity, which JSON
    lacks, become null.
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): rounded(item, digits) for key, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, list | tuple) else value


# -- summaries -----------------------------------------------------------------------------------


def latencies_s(records: Iterable[Record]) -> dict[str, list[float]]:
    """Returns every measured TTFT, TPOT, ITL and E2EL of requests that were answered to the end."""
    done = [r for r in records if r.ok]
    return {
        "ttft": [r.ttft_s for r in done],
        "tpot": [r.tpot_s for r in done if r.tpot_s is not None],
        "itl": [gap for r in done for gap in r.itls_s],
        "e2el": [r.e2el_s for r in done],
    }


def latency_summary(
    records: Iterable[Record],
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 90, 99),
) -> dict[str, float]:
    """Returns `mean_ttft_ms`, `median_ttft_ms`, `std_ttft_ms`, `p99_ttft_ms` and so on; 0 without
    samples.

    Percentiles interpolate linearly between samples.
    """
    measured = latencies_s(records)
    summary: dict[str, float] = {}
    for metric in metrics:
        values_ms = np.array(measured[metric] or [0.0]) * 1e3
        summary[f"mean_{metric}_ms"] = float(values_ms.mean())
        summary[f"median_{metric}_ms"] = float(np.median(values_ms))
        summary[f"std_{metric}_ms"] = float(values_ms.std())
        for percent in percentiles:
            summary[f"p{percent:g}_{metric}_ms"] = float(np.percentile(values_ms, percent))
    return summary


def violations(records: Iterable[Record], slo: Slo) -> dict[str, float | int | None]:
    """Returns late tokens over tokens: first tokens against the TTFT SLO, others against the ITL
    SLO.

    A request that failed or was refused is a late first token. A rate is None without tokens.
    """
    records = list(records)
    late_first = sum(not r.ok or r.ttft_s > slo.ttft_s for r in records)
    gaps = [gap for r in records for gap in r.itls_s]
    late = sum(gap > slo.itl_s for gap in gaps)
    return {
        "first_tokens": len(records),
        "late_first_tokens": late_first,
        "ttft_violation_rate": late_first / len(records) if records else None,
        "other_tokens": len(gaps),
        "late_other_tokens": late,
        "itl_violation_rate": late / len(gaps) if gaps else None,
    }


def late_shares(records: Iterable[Record], limits_ms: Mapping[str, float]) -> dict[str, Any]:
    """Returns `violations` by phase, against the limits there are: `ttft`, and `tpot` for every
    gap.
    """
    slo = Slo(*(limits_ms.get(metric, math.inf) / 1e3 for metric in ("ttft", "tpot")))
    late = violations(records, slo)
    fields = {"ttft": "ttft_violation_rate", "tpot": "itl_violation_rate"}
    return {field: late[field] for metric, field in fields.items() if metric in limits_ms}


def thresholds_seen(records: Iterable[Record]) -> dict[str, list[int] | None]:
    """Returns the smallest and largest threshold in percent that requests ran under, by phase."""
    records = list(records)
    found: dict[str, list[int] | None] = {}
    for phase in ("prefill_threshold", "decode_threshold"):
        spans = [span for r in records if (span := getattr(r, phase)) is not None]
        percents = [percent for span in spans for percent in span]
        found[f"{phase}_percent"] = [min(percents), max(percents)] if percents else None
    return found


def quality(records: Iterable[Record]) -> dict[str, Any]:
    """Returns the share of degraded expert visits, and of right answers, in all and by family."""
    records = list(records)
    visits = sum(r.expert_visits for r in records)
    judged = [r for r in records if r.correct is not None and r.ok]
    by_family = {
        family: _share_correct([r for r in judged if r.family == family])
        for family in sorted({r.family for r in judged})
    }
    return {
        "degraded_share": sum(r.degraded_visits for r in records) / visits if visits else None,
        "accuracy": _share_correct(judged),
        "accuracy_by_family": by_family,
    }


def _share_correct(records: Sequence[Record]) -> float | None:
    return sum(bool(r.correct) for r in records) / len(records) if records else None


def summarize(
    run: Run,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 90, 99),
    goodput: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Returns the fields of `vllm bench serve`, then `quality` and the generator's own cost.

    `goodput` maps metrics to limits in milliseconds; a request is good when it keeps them all.
    """
    done = [r for r in run.records if r.ok]
    num_input = sum(r.prompt_tokens for r in done)
    num_output = sum(len(r.token_s) for r in done)
    good = sum(_is_good(r, goodput) for r in done) if goodput else 0
    num_tokens = sum(len(r.token_s) for r in run.records)
    return {
        "duration": run.duration_s,
        "completed": len(done),
        "failed": len(run.records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / run.duration_s,
        "request_goodput": good / run.duration_s if goodput else None,
        "output_throughput": num_output / run.duration_s,
        "total_token_throughput": (num_input + num_output) / run.duration_s,
        **latency_summary(done, metrics, percentiles),
        **quality(run.records),
        "failures": dict(Counter(r.code for r in run.records if not r.ok)),
        "latest_send_ms": 1e3 * max((r.sent_s - r.at_s for r in run.records), default=0.0),
        "client_cpu_share": run.client_cpu_s / run.duration_s,
        "client_cpu_us_per_token": 1e6 * run.client_cpu_s / num_tokens if num_tokens else None,
    }


def _is_good(record: Record, limits_ms: dict[str, float]) -> bool:
    measured_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(measured_s[metric] * 1e3 <= limit for metric, limit in limits_ms.items())
