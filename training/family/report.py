"""Tables of `training.family.quality`, as docs/consolidation.md has them, and the picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jmoe.extras import pyplot
from training.markdown import table


def tables(found: Mapping[str, Any]) -> str:
    """Returns Markdown: the loss of every model, right answers by task family, and expert
    distances.
    """
    return "\n\n".join([losses(found), families(found), distances(found)])


def losses(found: Mapping[str, Any]) -> str:
    """Returns a table with a row for each setting and group and a column for each model: loss with
    its 95 % interval.
    """
    parts = []
    for group in dict.fromkeys(score["group"] for score in found["scores"]):
        own = [score for score in found["scores"] if score["group"] == group]
        own.sort(key=_place)
        names = group.split("+")
        rows = [["alone, % right", "", *(f"{found['alone'][n]:.1f}" for n in names), ""]]
        for rule, share in dict.fromkeys((s["rule"], s["share"]) for s in own):
            scores = {s["model"]: s for s in own if (s["rule"], s["share"]) == (rule, share)}
            extra = [f"{scores[n]['extra_percent']:.1f}" for n in names]
            cells = [_loss(scores[n]) for n in names]
            beside = " / ".join(extra) if any(float(e) for e in extra) else ""
            rows.append([rule, f"{share} %, {scores[names[0]]['slots']}", *cells, beside])
        head = ["rule", "shared, slots", *names, "extra memory, % of a model"]
        parts.append(f"**{', '.join(names)}**\n\n{table(head, rows, 'lr')}")
    return "\n\n".join(parts)


def families(found: Mapping[str, Any]) -> str:
    """Returns a table with a row for each model and setting and a column for each task family: %
    right.
    """
    names = list(found["families"][0]["right_percent"])
    rows = [
        [row["model"], row["setting"], *(f"{row['right_percent'][n]:.0f}" for n in names)]
        for row in found["families"]
    ]
    return table(["model", "setting", *names], rows, "lr")


def distances(found: Mapping[str, Any]) -> str:
    """Returns a table with a row for each pair of models and a column for each layer: mean L2
    distance and its range.
    """
    rows = []
    for row in found["distances"]:
        cells = [
            f"{mean:.2f} ({low:.2f} to {high:.2f})"
            for low, mean, high in zip(row["min"], row["mean"], row["max"], strict=True)
        ]
        agreement = " / ".join(map(str, row["rank correlation with cost"]))
        rows.append([" and ".join(row["models"]), *cells, agreement])
    layers = len(found["distances"][0]["mean"])
    elsewhere = [f"{d:.1f}" for d in found["distances"][0]["of other positions, base"]]
    rows.append(["base, another position", *elsewhere, ""])
    head = ["models", *(f"layer {layer}" for layer in range(layers)), "rank correlation with cost"]
    return table(head, rows, "lr")


def _place(score: Mapping[str, Any]) -> int:
    """Returns a score's place among the rows: rules are in the order of comparison, not of
    measurement.
    """
    order = ("functional", "paper", "average", "random", "residual", "average of all weights")
    return order.index(score["rule"].partition(",")[0])


def _loss(score: Mapping[str, Any]) -> str:
    return (
        f"{score['loss_percent']:.1f} ({score['low_percent']:.1f} to {score['high_percent']:.1f})"
    )


def write_picture(found: Float[np.ndarray, "N N L m"], names: Sequence[str], path: Path) -> None:
    """Writes a PNG: for each variant, how far its experts are from the base's, by layer and
    position.
    """
    plt = pyplot()

    count = len(names) - 1
    top = float(found[0, 1:].max())
    figure, axes = plt.subplots(
        count, 1, figsize=(11, 1.7 * count + 1), dpi=100, sharex=True, layout="constrained"
    )
    for axis, number in zip(np.atleast_1d(axes), range(1, count + 1), strict=True):
        shown = axis.imshow(found[0, number], aspect="auto", cmap="viridis", vmin=0, vmax=top)
        axis.set_title(f"{names[0]} and {names[number]}", loc="left", fontsize=11)
        axis.set_ylabel("MoE layer")
        axis.set_yticks(range(found.shape[2]))
    np.atleast_1d(axes)[-1].set_xlabel("expert")
    figure.colorbar(shown, ax=axes, label="L2 distance between weights")
    figure.savefig(path)
    plt.close(figure)
