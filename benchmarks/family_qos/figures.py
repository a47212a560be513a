"""What plays say: a record an alternative and rate, requests one at a time, and the tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.family_qos.config import ALTERNATIVES
from benchmarks.harness.command import markdown
from serving.bench.results import Record, Run, latency_summary

REFUSED = "RESOURCE_EXHAUSTED"
WORDS = {each.name: each.words for each in ALTERNATIVES}
SINGLE_WORDS = {
    "alone": "one model alone",
    "family": "one pool, all sets resident, models mixed",
    "control": "control: each model's own server",
    "hit": "one pool, half of the sets: the model's was there",
    "miss": "one pool, half of the sets: it was copied first",
}


# -- figures ---------------------------------------------------------------------------------------


def point(
    runs: Sequence[Run], names: Sequence[str], changes: int = 0, changing_s: float = 0.0
) -> dict[str, Any]:
    """Latencies over all of `runs` in milliseconds, requests and tokens a second, by model too.

    `worst` is the model whose turnaround is longest in the median. A run's time is to its last
    answer. Requests that name no model or only one (one model alone) have no figures by model.
    """
    records = [record for run in runs for record in run.records]
    duration_s = sum(run.duration_s for run in runs)
    by_model = {name: [r for r in records if r.model == name] for name in names}
    found = _figures(records, duration_s) | {"changes": changes, "changing_s": changing_s}
    found["latest_send_ms"] = 1e3 * max(r.sent_s - r.at_s for r in records)
    if sum(map(bool, by_model.values())) < 2:
        return found
    each = {name: _figures(own, duration_s) for name, own in by_model.items()}
    worst = max(each, key=lambda name: each[name].get("turnaround_median_ms", 0.0))
    return found | {"worst": worst, "by_model": each}


def _figures(records: Sequence[Record], duration_s: float) -> dict[str, Any]:
    done = [r for r in records if r.ok]
    refused = sum(r.code == REFUSED for r in records)
    counts = {
        "requests": len(records),
        "completed": len(done),
        "refused": refused,
        "failed": len(records) - len(done) - refused,
        "requests_per_s": len(done) / duration_s,
        "tokens_per_s": sum(len(r.token_s) for r in done) / duration_s,
    }
    return (_latencies(done) if done else {}) | counts


def _latencies(done: Sequence[Record]) -> dict[str, float]:
    summary = latency_summary(done, ("e2el", "ttft"), (90,))
    names = {"e2el": "turnaround", "ttft": "ttft"}
    return {
        f"{words}_{kind}_ms": summary[f"{kind}_{metric}_ms"]
        for metric, words in names.items()
        for kind in ("median", "p90", "mean")
    }


def single_figures(records: Sequence[Record]) -> dict[str, Any]:
    """Of requests one at a time: how many, and latencies in milliseconds where there are any."""
    done = [r for r in records if r.ok]
    counts = {"requests": len(records), "failed": len(records) - len(done)}
    return counts | (_latencies(done) if done else {})


def single_ratios(found: Mapping[str, Sequence[Record]]) -> dict[str, float]:
    """Returns the turnaround over that of one model alone, of the family and of the control: ratios
    of the medians, and the medians of ratios request by request.
    """
    took_s = {
        name: np.array([r.e2el_s if r.ok else np.nan for r in found[name]])
        for name in ("alone", "family", "control")
    }
    ratios = {}
    for name in ("family", "control"):
        medians = [float(np.nanmedian(took_s[which])) for which in (name, "alone")]
        ratios[f"{name}_to_alone"] = medians[0] / medians[1]
        ratios[f"{name}_to_alone_paired"] = float(np.nanmedian(took_s[name] / took_s["alone"]))
    return ratios


# -- tables ----------------------------------------------------------------------------------------


def tables(result: Mapping[str, Any]) -> list[str]:
    """Returns the lines of every size's tables: over request rate, and one request at a time."""
    lines = []
    for title, size in result.items():
        if title.endswith(" models"):
            lines += ["", f"{title}, one alone is saturated at {size['capacity_per_s']:.1f} req/s"]
            lines += _rates_table(size["points"])
            lines += ["", f"{title}, medians: turnaround / TTFT in ms; requests answered a second"]
            lines += _medians_table(size["points"])
            lines += ["", f"{title}, one request at a time", *_singles_table(size), ""]
            singles, (slow, fast) = size["singles"], size["machine_speed"]
            lines += [
                *(
                    f"Turnaround of the {name} over one model alone: medians "
                    f"{singles[f'{name}_to_alone']:.3f}, request by request "
                    f"{singles[f'{name}_to_alone_paired']:.3f}"
                    for name in ("family", "control")
                ),
                f"Between plays the machine did {slow:.2f} to {fast:.2f} times its median's work",
            ]
    return lines


def _rates_table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ["load", "", "turnaround ms, median / P90", "TTFT ms, median / P90"]
    columns += ["req/s", "tokens/s", "worst model, median ms", "refused", "failed", "changes"]
    rows = []
    for one in points:
        worst = one.get("worst")
        rows.append(
            [
                f"{one['load']:g}: {one['rate_per_s']:.1f} req/s",
                WORDS[one["alternative"]],
                _pair(one, "turnaround"),
                _pair(one, "ttft"),
                f"{one['requests_per_s']:.1f}",
                f"{one['tokens_per_s']:.0f}",
                worst and f"{worst} {_ms(one['by_model'][worst].get('turnaround_median_ms'))}",
                one["refused"],
                one["failed"],
                one["changes"] or None,
            ]
        )
    return markdown(columns, rows)


def _medians_table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    loads = sorted({one["load"] for one in points})
    by = {(one["alternative"], one["load"]): one for one in points}
    rates = {one["load"]: f"{one['load']:g}: {one['rate_per_s']:.1f} req/s" for one in points}
    rows = []
    for name, words in WORDS.items():
        each = [by[name, load] for load in loads]
        cells = (
            f"{_ms(one.get('turnaround_median_ms'))} / {_ms(one.get('ttft_median_ms'))}; "
            f"{one['requests_per_s']:.1f}"
            for one in each
        )
        rows.append([words, *cells])
    return markdown(["", *(rates[load] for load in loads)], rows)


def _singles_table(size: Mapping[str, Any]) -> list[str]:
    columns = ["", "requests", "turnaround ms, median / P90", "TTFT ms, median / P90"]
    every = size["singles"]
    rows = [
        [
            words,
            every[name]["requests"],
            _pair(every[name], "turnaround"),
            _pair(every[name], "ttft"),
        ]
        for name, words in SINGLE_WORDS.items()
    ]
    return markdown(columns, rows)


def _pair(figures: Mapping[str, Any], metric: str) -> str:
    return " / ".join(_ms(figures.get(f"{metric}_{kind}_ms")) for kind in ("median", "p90"))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.{0 if value >= 100 else 1}f}"
