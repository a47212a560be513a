"""The picture: a row a number of models, turnaround, TTFT and throughput over request rate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.family_qos.config import ALTERNATIVES

PANELS = (
    ("turnaround", "Turnaround"),
    ("ttft", "Time to first token"),
    ("requests_per_s", "Throughput"),
)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Writes the PNG, 1600 wide: medians with dots, P90 dotted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sizes = {name: size for name, size in result.items() if name.endswith(" models")}
    with plt.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(
            len(sizes), len(PANELS), figsize=(16, 1.2 + 4.3 * len(sizes)), dpi=100, squeeze=False
        )
        for row, (name, size) in zip(axes, sizes.items(), strict=True):
            for axis, (metric, title) in zip(row, PANELS, strict=True):
                _draw_panel(axis, size, metric)
                axis.set_title(f"{title}, {name}", loc="left", fontweight="bold")
        for axis in axes[-1]:
            axis.set_xlabel("requests a second that arrive, all models together")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
        figure.tight_layout(rect=(0, 0.13 / len(sizes) + 0.01, 1, 1), h_pad=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _draw_panel(axis: Any, size: Mapping[str, Any], metric: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    throughput = metric == "requests_per_s"
    rates = sorted({one["rate_per_s"] for one in size["points"]})
    if throughput:
        axis.plot(rates, rates, color="#bbbbbb", lw=1, ls="--", label="all that arrives")
    for each in ALTERNATIVES:
        points = [one for one in size["points"] if one["alternative"] == each.name]
        if throughput:
            pairs = sorted((one["rate_per_s"], one[metric]) for one in points)
            axis.plot(*zip(*pairs, strict=True), "o-", color=each.color, lw=2)
            continue
        for kind, style in (("median", "o-"), ("p90", ":")):
            key = f"{metric}_{kind}_ms"
            pairs = sorted((one["rate_per_s"], one[key]) for one in points if key in one)
            if pairs:
                words = f"{each.words}, {'P90' if kind == 'p90' else 'median'}"
                label = words if kind == "median" else None
                axis.plot(*zip(*pairs, strict=True), style, color=each.color, lw=2, label=label)
    if throughput:
        axis.set_ylabel("requests a second that are answered")
        axis.set_ylim(bottom=0)
    else:
        if metric == "turnaround":
            axis.plot([], [], ":", color="#333333", label="dotted: P90 of the same")
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_ylabel("ms, log scale")
    axis.set_xlim(left=0)
    axis.grid(color="#dddddd", lw=0.7)
