"""What a server's metrics say of its mesh between two scrapes, and the table and picture of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from serving.bench.scrape import Samples, value

PHASES = ("prefill", "decode")
MEGABYTE = 1e6


def rows_by_device(samples: Samples) -> Float[np.ndarray, "layers D"]:
    """Returns the rows that each device's experts computed, by MoE layer; [0, 0] without a mesh."""
    found = {
        (int(dict(labels)["layer"]), int(dict(labels)["device"])): rows
        for (name, labels), rows in samples.items()
        if name == "jmoe_device_expert_rows_total"
    }
    rows = np.zeros([max((at[axis] for at in found), default=-1) + 1 for axis in (0, 1)])
    for at, count in found.items():
        rows[at] = count
    return rows


def heat(before: Samples, after: Samples) -> Float[np.ndarray, "layers D"]:
    """Returns each device's load between two scrapes over its layer's mean; 1 where a layer had
    none.
    """
    rows, earlier = rows_by_device(after), rows_by_device(before)
    if earlier.size:
        rows = rows - earlier
    mean = rows.mean(axis=1, keepdims=True) if rows.size else rows
    return np.divide(rows, mean, out=np.ones_like(rows), where=mean > 0)


def between(before: Samples, after: Samples) -> dict[str, Any]:
    """Returns the mesh's figures between two scrapes; None for what did not occur.

    `imbalance` is the mean over steps, by phase. Two are since the server's start: `padded_share`,
    as the metric is, and `placed`, as most copies that stay are placed before the first scrape.
    """

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    imbalance, steps = {}, {}
    for phase in PHASES:
        count = more("imbalance_ratio_count", phase=phase)
        total = more("imbalance_ratio_sum", phase=phase)
        imbalance[phase] = total / count if count else None
        steps[phase] = int(count)
    expected = more("expected_visits_total")
    return {
        "imbalance": imbalance,
        "steps": steps,
        "right_share": more("expected_visits_right_total") / expected if expected else None,
        "copied": int(more("experts_copied_total")),
        "placed": int(value(after, "experts_placed_total")),
        "copy_bytes": int(more("expert_copy_bytes_total")),
        "padded_share": value(after, "padded_rows_perc"),
        "heat": heat(before, after).tolist(),
    }


def table(result: Mapping[str, Any]) -> str:
    """Returns a table with a line for each variant."""
    platform = result["machine"]["platform"].split()[0]
    head = f"{'':10} {'imbalance: prefill':>18} {'decode':>7} {'foreseen right':>14}"
    head += f" {'copied':>8} {'placed':>6} {'copies, MB':>10} {'padded':>7} {'failed':>6}"
    lines = [head + f" {f'tokens/s on this {platform}':>21}"]
    for run in result["runs"]:
        prefill, decode = (_number(run["imbalance"][phase]) for phase in PHASES)
        right = "-" if run["right_share"] is None else f"{100 * run['right_share']:.1f} %"
        lines.append(
            f"{run['variant']:10} {prefill:>18} {decode:>7} {right:>14} {run['copied']:8}"
            f" {run['placed']:6} {run['copy_bytes'] / MEGABYTE:10.1f}"
            f" {100 * run['padded_share']:5.1f} % {run['failed']:6} {run['tokens_per_s']:21.0f}"
        )
    return "\n".join(lines)


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws a heat map for each variant, as PNG: load of each device over the mean, by MoE
    layer.
    """
    from jmoe.extras import pyplot  # not above: it would bring jax

    plt = pyplot()

    runs: Sequence[Mapping[str, Any]] = result["runs"]
    figure, axes = plt.subplots(
        1, len(runs), figsize=(5.2 * len(runs), 4.2), dpi=100, squeeze=False, layout="constrained"
    )
    image = None
    for axis, run in zip(axes[0], runs, strict=True):
        loads = np.array(run["heat"])
        image = axis.imshow(loads, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
        if loads.size <= 128:  # else they would not be read
            for (layer, device), load in np.ndenumerate(loads):
                dark = abs(load - 1) > 0.6
                color = "white" if dark else "black"
                axis.text(device, layer, f"{load:.2f}", ha="center", va="center", color=color)
        ratios = (f"{phase} {_number(run['imbalance'][phase])}" for phase in PHASES)
        axis.set_title(f"{run['words']}\nimbalance: {', '.join(ratios)}", fontsize=11)
        axis.set_xlabel("device")
        axis.set_ylabel("MoE layer")
        axis.set_xticks(range(loads.shape[1]))
        axis.set_yticks(range(loads.shape[0]))
    if image is not None:
        figure.colorbar(image, ax=axes[0].tolist(), label="load over the layer's mean")
    figure.savefig(path)
    plt.close(figure)
