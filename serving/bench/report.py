"""What a burst run looks like: a table for the terminal and one picture. No jax.

A result is the JSON-like dict that `serving.bench.demo` stores: of the median pair `slo`,
`duration_s`, `burst_at_s`, both rates, and `runs` by name of `serving.bench.variants`: "zero" (no
brownout) first. The verdict is on the last one, over all `pairs`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from serving.bench.results import Record
from serving.bench.variants import VARIANTS, Variant

ALLOWED_LATE_SHARE = 0.1  # the objectives are on the P90
LEAST_GAIN = 1.15
"""In capacity, with all of the brownout: what buys less cannot hold what is missed without it."""
METRICS = ("ttft", "itl")
_SLO_COLOR, _WARNING_COLOR = "#c1121f", "#2563eb"
_BEHIND_TEXT = {"facecolor": "white", "alpha": 0.75, "lw": 0, "pad": 1}
_PHASES = (
    ("ttft", "prefill", "Time to first token (prefill)"),
    ("itl", "decode", "Time between tokens (decode)"),
)


def latency_series(
    records: Iterable[Record], duration_s: float, window_s: float = 1.5, percentile: float = 90
) -> dict[str, list[float | None]]:
    """Returns percentiles by window of the run: `end_s`, `ttft_s`, `itl_s`; None for an empty
    window.

    A first token counts in the window in which its request was due, other tokens in the one in
    which they came. A request that failed counts as late as the run is long.
    """
    records = list(records)
    points = {
        "ttft_s": [(r.at_s, r.ttft_s if r.ok else duration_s) for r in records],
        "itl_s": [
            (at, gap) for r in records for at, gap in zip(r.token_s[1:], r.itls_s, strict=True)
        ],
    }
    edges = np.arange(0, duration_s + window_s, window_s)
    series: dict[str, list[float | None]] = {"end_s": list(map(float, edges[1:]))}
    for name, pairs in points.items():
        at_s, values = np.array(pairs, float).reshape(-1, 2).T
        window = np.digitize(at_s, edges) - 1
        series[name] = [
            float(np.percentile(chosen, percentile)) if len(chosen := values[window == i]) else None
            for i in range(len(edges) - 1)
        ]
    return series


# -- the table -----------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> Table:
    """Returns all runs side by side; violation rates are red above 10 %, the share that a P90
    allows.
    """
    runs = result["runs"]
    slo = result["slo"]
    drawn = Table(
        title=f"{_label(result)}SLO: TTFT {_ms(slo['ttft_s'] * 1e3)}, "
        f"ITL {_ms(slo['itl_s'] * 1e3)}",
        title_justify="left",
    )
    drawn.add_column("")
    for name in runs:
        drawn.add_column(VARIANTS[name].label, justify="right")
    for label, cell in _ROWS:
        drawn.add_row(label, *(cell(run) for run in runs.values()), end_section=label in _SECTIONS)
    return drawn


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.{0 if value >= 100 else 1}f} ms"


def _share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _violation(phase: str, metric: str) -> Callable[[dict[str, Any]], str]:
    def cell(run: dict[str, Any]) -> str:
        value = run[phase][f"{metric}_violation_rate"]
        color = "red" if value is not None and value > ALLOWED_LATE_SHARE else "green"
        return f"[{color}]{_share(value)}[/]"

    return cell


def _percentiles(metric: str) -> Callable[[dict[str, Any]], str]:
    keys = [f"p{percent}_{metric}_ms" for percent in (50, 90, 99)]
    return lambda run: " / ".join(f"{run['burst'][key]:.0f}" for key in keys)


def _thresholds(run: dict[str, Any]) -> str:
    means = run["burst"]["mean_thresholds_percent"]
    return " / ".join("-" if mean is None else f"{mean:.0f} %" for mean in means.values())


_ROWS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("answered / failed", lambda run: f"{run['completed']} / {run['failed']}"),
    (
        "throughput",
        lambda run: f"{run['request_throughput']:.1f} req/s, {run['output_throughput']:.0f} tok/s",
    ),
    ("burst: TTFT P50 / P90 / P99, ms", _percentiles("ttft")),
    ("burst: ITL P50 / P90 / P99, ms", _percentiles("itl")),
    ("steady: late first tokens", _violation("steady", "ttft")),
    ("steady: late other tokens", _violation("steady", "itl")),
    ("burst: late first tokens", _violation("burst", "ttft")),
    ("burst: late other tokens", _violation("burst", "itl")),
    ("burst: threshold, prefill / decode", _thresholds),
    ("burst: degraded visits", lambda run: _share(run["burst"]["degraded_share"])),
    ("right answers, whole run", lambda run: _share(run["accuracy"])),
    ("right answers, burst", lambda run: _share(run["burst"]["accuracy"])),
]
_SECTIONS = ("throughput", "burst: ITL P50 / P90 / P99, ms", "burst: late other tokens")


# -- the verdict ---------------------------------------------------------------------------------


def too_little(gain: float) -> str:
    """Says that brownout cannot keep objectives on a machine; `gain` is in capacity."""
    return (
        f"brownout buys too little here: with all of it, this machine answers {gain:.2f} times as "
        f"many requests, and {LEAST_GAIN:g} times would show"
    )


def pair_line(number: int, pair: Mapping[str, Any]) -> str:
    """Returns a line about a pair: its late tokens, and why it does not count if it does not."""
    zero, brownout = (pair["runs"][name]["burst"] for name in _compared(pair))
    counts = f"; does not count: {pair['why_not']}" if pair["why_not"] else ""
    return (
        f"pair {number}, late first / other tokens in the burst: {_late(zero)} without brownout, "
        f"{_late(brownout)} with{counts}"
    )


def median_pair(pairs: Sequence[Mapping[str, Any]]) -> int:
    """Returns the index of the pair in the middle by what brownout changes of the burst's late
    tokens, of those that count if any do.
    """

    def change(at: int) -> float:
        runs = pairs[at]["runs"]
        zero, brownout = (
            sum(runs[name]["burst"][f"{metric}_violation_rate"] or 0.0 for metric in METRICS)
            for name in _compared(pairs[at])
        )
        return brownout - zero

    counted = [at for at, pair in enumerate(pairs) if not pair["why_not"]]
    ordered = sorted(counted or range(len(pairs)), key=change)
    return ordered[(len(ordered) - 1) // 2]


def verdict(result: Mapping[str, Any]) -> str:
    """Says in plain words what happened to the SLO in the bursts, whichever way it went: medians of
    the pairs that count, and their range.
    """
    return _label(result) + _verdict(result)


def _verdict(result: Mapping[str, Any]) -> str:
    pairs = [pair for pair in result["pairs"] if not pair["why_not"]]
    played = f"{len(pairs)} of {len(result['pairs'])} pairs count"
    if result["gain"] < LEAST_GAIN:
        return f"Nothing to show: {too_little(result['gain'])}."
    if len(pairs) < min(2, len(result["pairs"])):
        again = (
            "." if result.get("simulated") else ", or on its step times: `jmoe demo --simulated`."
        )
        return (
            f"This machine is too busy to tell: {played}. Stop what else runs on it, and play the "
            f"demo again{again}"
        )
    zero, brownout = (
        _Bursts([pair["runs"][name]["burst"] for pair in pairs]) for name in _compared(result)
    )
    late = (
        f"In the bursts {zero.late()} came late without brownout, and {brownout.late()} with it; "
        f"a P90 objective allows {ALLOWED_LATE_SHARE:.0%}."
    )
    right = [bursts.median("accuracy") for bursts in (zero, brownout)]
    price = (
        f"The price: {_share(brownout.median('degraded_share'))} of expert visits degraded"
        + ("" if None in right else f", right answers {' -> '.join(map(_share, right))}")
        + "."
    )
    if all(zero.kept().values()):
        opening = "Nothing to prove: the SLO held without brownout too."
    elif all(brownout.kept().values()):
        opening = "Brownout held the SLO through the bursts."
    else:
        missed = [metric for metric, fine in brownout.kept().items() if not fine]
        named = " and ".join(map(str.upper, missed))
        improved = all(brownout.rate(metric) < zero.rate(metric) for metric in missed)
        opening = f"Brownout did not hold the SLO: {named} missed" + (
            ", though by less than without it." if improved else ", no better than without it."
        )
    return f"{opening} {late} {price} {played[0].upper() + played[1:]}."


class _Bursts:
    """The bursts of one variant, over pairs."""

    def __init__(self, bursts: Sequence[Mapping[str, Any]]) -> None:
        self._bursts = bursts

    def values(self, key: str) -> list[float]:
        return [burst[key] for burst in self._bursts if burst[key] is not None]

    def median(self, key: str) -> float | None:
        values = self.values(key)
        return float(np.median(values)) if values else None

    def rate(self, metric: str) -> float:
        return self.median(f"{metric}_violation_rate") or 0.0

    def kept(self) -> dict[str, bool]:
        return {metric: self.rate(metric) <= ALLOWED_LATE_SHARE for metric in METRICS}

    def late(self) -> str:
        def words(metric: str) -> str:
            values = self.values(f"{metric}_violation_rate")
            if not values:
                return "-"
            spread = f" ({_share(min(values))} to {_share(max(values))})" if len(values) > 1 else ""
            return f"{_share(self.rate(metric))}{spread}"

        return f"{words('ttft')} of first tokens and {words('itl')} of the others"


def _compared(result: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the names of the run without brownout and of the last one."""
    names = list(result["runs"])
    return names[0], names[-1]


def _label(result: Mapping[str, Any]) -> str:
    return "Simulated: " if result.get("simulated") else ""


def _late(burst: Mapping[str, Any]) -> str:
    return " / ".join(_share(burst[f"{metric}_violation_rate"]) for metric in METRICS)


# -- the picture ---------------------------------------------------------------------------------


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Writes the picture, 1600x900 PNG: P90 latencies over thresholds, prefill and decode."""
    from jmoe.extras import pyplot  # not above: it would bring jax

    plt = pyplot()

    with plt.rc_context({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(
            2, 2, figsize=(16, 9), dpi=100, sharex=True, height_ratios=[3, 2], squeeze=False
        )
        for column, (metric, phase, title) in enumerate(_PHASES):
            _draw_latency(axes[0, column], result, metric, title)
            _draw_thresholds(axes[1, column], result, phase)
            for axis in axes[:, column]:
                axis.axvspan(result["burst_at_s"], result["duration_s"], color="#00000010", lw=0)
                axis.set_xlim(0, result["duration_s"])
            axes[1, column].set_xlabel("time in seconds")
        figure.suptitle(_headline(result), fontsize=18, fontweight="bold", x=0.01, ha="left")
        figure.text(0.01, 0.918, _subtitle(result), color="#333333")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
        figure.tight_layout(rect=(0, 0.045, 1, 0.925), h_pad=1.5, w_pad=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _headline(result: Mapping[str, Any]) -> str:
    factor = result["burst_rate_per_s"] / result["steady_rate_per_s"]
    count = len(result["runs"])
    times = "twice" if count == 2 else f"{count} times"
    rise = "doubles" if round(factor, 2) == 2 else f"rises {factor:.3g}-fold"
    told = f"Load {rise} at {result['burst_at_s']:.0f} s: the same requests, played {times}"
    return f"{_label(result)}{told}"


def _subtitle(result: Mapping[str, Any]) -> str:
    zero, brownout = (result["runs"][name]["burst"] for name in _compared(result))
    parts = [
        f"{words}: {_share(zero[key], 0)} without brownout, {_share(brownout[key], 0)} with"
        for words, key in (
            ("Late first tokens in the burst", "ttft_violation_rate"),
            ("late other tokens", "itl_violation_rate"),
            ("right answers", "accuracy"),
        )
        if zero[key] is not None
    ]
    return ";  ".join(parts)


def _draw_latency(axis: Any, result: Mapping[str, Any], metric: str, title: str) -> None:
    slo_s = result["slo"][f"{metric}_s"]
    warning_s = slo_s * result["slo"]["warning_factor"]
    values = [v for run in result["runs"].values() for v in run["series"][f"{metric}_s"] if v]
    low = min([warning_s, *values]) * 0.7
    # Far above the SLO only the fact matters; what is cut off is marked with triangles.
    high = min(max([slo_s, *values]) * 1.2, slo_s * (200 if metric == "ttft" else 4))
    log = high / low > 8
    _scale_axis(axis, low if log else 0.0, high, log)
    for number, (name, run) in enumerate(result["runs"].items()):
        _draw_series(axis, run["series"], f"{metric}_s", VARIANTS[name], number, high)
    _draw_predicted(axis, result, metric, high)
    for value_s, word, color, below in (
        (slo_s, "SLO", _SLO_COLOR, False),
        (warning_s, "warning line", _WARNING_COLOR, True),
    ):
        axis.axhline(value_s, color=color, ls="--", lw=1.6)
        axis.annotate(
            f"{word} {_ms(value_s * 1e3)}",
            (0, value_s),
            xytext=(6, -4 if below else 3),
            textcoords="offset points",
            va="top" if below else "bottom",
            color=color,
            bbox=_BEHIND_TEXT,
        )
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_ylabel("P90, log scale" if log else "P90")
    axis.text(result["burst_at_s"], 0.96, "  burst", va="top", transform=axis.get_xaxis_transform())


def _scale_axis(axis: Any, low: float, high: float, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 500 else (1,)))
        axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylim(low, high)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axis.grid(axis="y", color="#dddddd", lw=0.7)


def _tick(value_s: float) -> str:
    return f"{value_s:g} s" if value_s >= 1 else f"{value_s * 1e3:g} ms"


def _draw_series(
    axis: Any, series: Mapping[str, Any], key: str, variant: Variant, number: int, high: float
) -> None:
    at_s = np.array(series["end_s"]) - series["end_s"][0] / 2
    values = np.array([np.nan if v is None else v for v in series[key]])
    axis.plot(at_s, np.minimum(values, high), color=variant.color, lw=2.6, label=variant.label)
    cut = values > high
    if cut.any():
        axis.plot(at_s[cut], np.full(cut.sum(), high), "^", color=variant.color, clip_on=False)
        axis.annotate(
            f"▲ off the scale, up to {_tick(float(f'{np.nanmax(values):.2g}'))}",
            (1, 0.96 - 0.07 * number),
            xycoords="axes fraction",
            ha="right",
            va="top",
            color=variant.color,
            bbox=_BEHIND_TEXT,
        )


def _draw_predicted(axis: Any, result: Mapping[str, Any], metric: str, high: float) -> None:
    """Draws what the last run's controller expected, if it predicts latencies."""
    name = _compared(result)[1]
    samples = result["runs"][name]["samples"]
    values = [np.nan if v is None else v for v in samples.get(f"predicted_{metric}_p90_s", ())]
    if not np.isfinite(values).any():
        return
    axis.plot(
        samples["at_s"],
        np.minimum(values, high),
        color=VARIANTS[name].color,
        lw=1.2,
        ls=":",
        label="expected by its controller",
    )


def _draw_thresholds(axis: Any, result: Mapping[str, Any], phase: str) -> None:
    for name, run in result["runs"].items():
        if VARIANTS[name].with_brownout:
            thresholds = run["samples"][f"{phase}_threshold_percent"]
            axis.step(
                run["samples"]["at_s"], thresholds, where="post", color=VARIANTS[name].color, lw=2.2
            )
    run = result["runs"][_compared(result)[1]]
    mean = run["burst"]["mean_thresholds_percent"][phase]
    title = f"{phase.capitalize()} threshold (100 %: nothing degraded)"
    if mean is not None:
        burst = (result["burst_at_s"], result["duration_s"])
        axis.plot(burst, (mean, mean), color="#666666", ls=":", lw=1.6)
        title += f"; burst mean {mean:.0f} %"
    axis.set_ylim(-3, 108)
    axis.set_ylabel("threshold, %")
    axis.set_title(title, loc="left", fontsize=13)
    axis.grid(axis="y", color="#dddddd", lw=0.7)
