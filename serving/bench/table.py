"""A benchmark's result as text, laid out as `vllm bench serve` lays out its own."""

from collections.abc import Iterable, Mapping
from typing import Any

WIDTH, LABEL_WIDTH = 50, 39

_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def result_table(result: Mapping[str, Any]) -> str:
    """Returns the result of `serving.bench.run.run_bench` in lines of `WIDTH`; "-" for a missing
    figure.
    """
    lines = [" Serving Benchmark Result ".center(WIDTH, "="), *_totals(result)]
    for metric, title in _TITLES.items():
        if f"mean_{metric}_ms" in result:
            lines += [title.center(WIDTH, "-"), *_latencies(result, metric)]
    for name, of_class in result.get("classes", {}).items():
        words = name.replace("_", " ").capitalize()
        lines += [words.center(WIDTH, "-"), *_class(of_class)]
    for name, of_model in result.get("models", {}).items():
        lines += [f"Model {name}".center(WIDTH, "-"), *_class(of_model)]
    lines += ["Brownout".center(WIDTH, "-"), *_brownout(result)]
    lines += [
        "Load Generator".center(WIDTH, "-"),
        _row("Latest request after it was due (ms):", result["latest_send_ms"]),
        _row("Busy share of one core (%):", _percent(result["client_cpu_share"])),
        "=" * WIDTH,
    ]
    return "\n".join(lines)


def _totals(result: Mapping[str, Any]) -> Iterable[str]:
    yield _row("Successful requests:", result["completed"])
    yield _row("Failed requests:", result["failed"])
    for code, num in result["failures"].items():
        yield _row(f"  {code}:", num)
    if result["max_concurrency"] is not None:
        yield _row("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        yield _row("Request rate configured (RPS):", result["request_rate"])
    yield _row("Benchmark duration (s):", result["duration"])
    yield _row("Total input tokens:", result["total_input_tokens"])
    yield _row("Total generated tokens:", result["total_output_tokens"])
    yield _row("Request throughput (req/s):", result["request_throughput"])
    yield _row("Request goodput (req/s):", result["request_goodput"])
    yield _row("Output token throughput (tok/s):", result["output_throughput"])
    yield _row("Total token throughput (tok/s):", result["total_token_throughput"])
    if result["accuracy"] is not None:
        yield _row("Right answers (%):", _percent(result["accuracy"]))


def _class(of_class: Mapping[str, Any]) -> Iterable[str]:
    yield _row("Requests:", of_class["requests"])
    yield _row("Successful ones:", of_class["completed"])
    if "request_throughput" in of_class:
        yield _row("Request throughput (req/s):", of_class["request_throughput"])
        yield _row("Output token throughput (tok/s):", of_class["output_throughput"])
    for metric in _TITLES:
        yield from _latencies(of_class, metric)


def _latencies(result: Mapping[str, Any], metric: str) -> Iterable[str]:
    end = f"_{metric}_ms"
    for field, value in result.items():
        kind = field.removesuffix(end)
        if field.endswith(end) and kind != "std":
            yield _row(f"{kind.capitalize()} {metric.upper()} (ms):", value)


def _brownout(result: Mapping[str, Any]) -> Iterable[str]:
    yield _row("Degraded expert visits (%):", _percent(result["degraded_share"]))
    for phase in ("prefill", "decode"):
        seen = result[f"{phase}_threshold_percent"]
        text = None if seen is None else "-".join(f"{percent:g}" for percent in sorted({*seen}))
        yield _row(f"{phase.capitalize()} threshold seen (%):", text)
    if "ttft_violation_rate" in result:
        yield _row("Late first tokens, prefill (%):", _percent(result["ttft_violation_rate"]))
    if "itl_violation_rate" in result:
        yield _row("Late other tokens, decode (%):", _percent(result["itl_violation_rate"]))


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _row(label: str, value: str | float | None) -> str:
    if value is None:
        value = "-"
    elif isinstance(value, float):
        value = f"{value:.2f}"
    return f"{label:<{LABEL_WIDTH}} {value:>{WIDTH - LABEL_WIDTH - 1}}"
