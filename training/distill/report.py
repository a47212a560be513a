"""The results of a distillation: a table and a picture of the errors by way and layer."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jmoe.extras import need
from training.markdown import table

REPORT_FILES = "distill.md", "distill.png"


@dataclasses.dataclass(frozen=True)
class LayerResult:
    """Relative error of one layer's united experts on held-out rows, before and after training.

    Squared error over the squared size of what the objective wants: 0 is perfect, 1 is what silence
    would give.
    """

    way: int
    layer: int
    error_before: float
    error_after: float
    steps: int


@dataclasses.dataclass(frozen=True)
class RefineResult:
    """Divergence from the exact model in nats a token on held-out rows, before and after; after
    also by data file, where there are several (NaN: none of its texts is held out).
    """

    way: int
    before: float
    after: float
    by_file: Sequence[float] = ()


def write_report(
    out: Path,
    layers: Sequence[LayerResult],
    refined: Sequence[RefineResult],
    files: Sequence[str],
    settings: str,
) -> None:
    """Writes `distill.md` and `distill.png` into `out`; `files` are the names of the data's."""
    ways = sorted({r.way for r in layers})
    rows = [
        [str(r.way), str(r.layer), f"{r.error_before:.4f}", f"{r.error_after:.4f}", str(r.steps)]
        for r in layers
    ]
    head = ["way", "layer", "error before", "error after", "steps"]
    parts = ["# Distillation of united experts", settings, table(head, rows, "l")]
    if refined:
        rows = [[str(r.way), f"{r.before:.4f}", f"{r.after:.4f}"] for r in refined]
        parts.append("End to end, divergence from the exact model in nats a token:")
        parts.append(table(["way", "before", "after"], rows, "l"))
    if any(r.by_file for r in refined):
        rows = [
            [str(r.way), file, f"{divergence:.4f}"]
            for r in refined
            for file, divergence in zip(files, r.by_file, strict=True)
        ]
        parts.append("After, by data file:")
        parts.append(table(["way", "file", "divergence"], rows, "l"))
    (out / "distill.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    _draw(out / "distill.png", layers, ways)


def _draw(path: Path, layers: Sequence[LayerResult], ways: Sequence[int]) -> None:
    need("plot", "matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    colours = ("#1b7f5a", "#d95f02", "#3366cc", "#7a3e9d", "#555555")
    for colour, way in zip(colours, ways, strict=False):
        own = [r for r in layers if r.way == way]
        numbers = [r.layer for r in own]
        axes.plot(numbers, [r.error_before for r in own], ":", color=colour)
        axes.plot(numbers, [r.error_after for r in own], "o-", color=colour, label=f"way {way}")
    axes.set(xlabel="MoE layer", ylabel="relative squared error, held-out rows", yscale="log")
    axes.set_title("United experts before (dotted) and after training")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
