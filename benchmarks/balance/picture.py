"""One picture of it all: who balances how well, where load lies, and what is predicted."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from benchmarks.balance.strategies import STRATEGIES, Case
from benchmarks.balance.traces import Trace

STREAM_COLOURS = {
    "none": "0.6",
    "EPLB": "tab:olive",
    "Lina": "tab:orange",
    "Libra, both as printed": "tab:red",
    "Libra, modelled": "tab:blue",
}


def draw(found: dict[str, Any], trace: Trace, path: Path) -> None:
    """Writes the picture of a run's figures and one of its traces."""
    figure, axes = plt.subplots(2, 2, figsize=(15, 10), layout="constrained")
    _strategies(axes[0, 0], found["synthetic"]["85"])
    _heat(axes[0, 1], trace, found["settings"]["num_replicas"])
    _stream(axes[1, 0], found["bundled"]["stream"])
    _accuracy(axes[1, 1], found["bundled"]["pick_accuracy"])
    figure.suptitle("Load of the fullest device over the mean load: 1 is perfect balance")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _strategies(axis: Axes, by_bound: dict[str, Any]) -> None:
    names = list(STRATEGIES)[::-1]
    place = np.arange(len(names))
    for bound, shift, colour in (("None", 0.2, "tab:blue"), ("2", -0.2, "tab:green")):
        rows = [by_bound[bound][name] for name in names]
        label = "no bound" if bound == "None" else f"at most {bound} experts a pair of devices"
        p99 = [row["p99"] - 1 for row in rows]
        axis.barh(place + shift, p99, 0.38, left=1, color=colour, alpha=0.45, label=f"P99, {label}")
        median = [row["median"] for row in rows]
        axis.plot(median, place + shift, "|", color=colour, ms=14, mew=3, label=f"median, {label}")
        for row, at in zip(rows, place + shift, strict=True):
            axis.text(row["p99"] + 0.01, at, f"{row['p99']:.3f}", va="center", fontsize=8)
    axis.set_yticks(place, names)
    axis.set_xlim(left=1)
    axis.set_xlabel("imbalance")
    axis.set_title("Synthetic traces, 8 devices x 128 experts, prediction 85 % right")
    axis.legend(fontsize=8, loc="lower right")


def _heat(axis: Axes, trace: Trace, num_replicas: int) -> None:
    case = Case(
        trace.made, trace.predicted(0.85), trace.predicted(0.437), trace.history, num_replicas, None
    )
    loads = np.array([np.asarray(balance(case)) for balance in STRATEGIES.values()], float)
    loads /= loads.mean(axis=1, keepdims=True)
    image = axis.imshow(loads, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
    for (row, column), value in np.ndenumerate(loads):
        dark = abs(value - 1) > 0.6
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", color="w" if dark else "k")
    axis.set_yticks(range(len(STRATEGIES)), list(STRATEGIES))
    axis.set_xticks(range(loads.shape[1]), [f"device {g}" for g in range(loads.shape[1])])
    axis.set_title("Load of each device over the mean, the most skewed of these traces")
    axis.figure.colorbar(image, ax=axis)


def _stream(axis: Axes, by_name: dict[str, list[float]]) -> None:
    for name, values in by_name.items():
        axis.plot(values, marker=".", label=name, color=STREAM_COLOURS[name])
    axis.set_xlabel("prefill step (prompts of all task families, shuffled)")
    axis.set_ylabel("imbalance")
    axis.set_title("Bundled model, last layer, step by step (the paper's Figure 9)")
    axis.legend(fontsize=8)


def _accuracy(axis: Axes, by_family: dict[str, dict[str, float]]) -> None:
    families, names = list(by_family), list(next(iter(by_family.values())))
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        values = [100 * by_family[family][name] for family in families]
        axis.bar(np.arange(len(families)) + n * width - 0.4 + width / 2, values, width, label=name)
    axis.set_xticks(range(len(families)), families, rotation=30)
    axis.set_ylim(0, 100)
    axis.set_ylabel("% of each row's experts")
    axis.set_title("Bundled model: prediction right, by task family (the paper's Table 1)")
    axis.legend(fontsize=8)
