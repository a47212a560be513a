"""Draws figures over request rate, a panel each, with a line for each way to serve. No jax."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """(rate, figure) pairs of one way to serve; a panel's lines have the colors C0, C1, ..."""

    label: str
    pairs: Sequence[tuple[float, float]]
    dashed: bool = False


class Panel(NamedTuple):
    """One figure over request rate."""

    title: str
    lines: Sequence[Line]
    log: bool


def draw_over_rate(panels: Sequence[Panel], path: Path) -> None:
    """Writes the PNG, with a legend in the first panel."""
    from jmoe.extras import pyplot  # not above: it would bring jax

    plt = pyplot()

    with plt.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(
            1, len(panels), figsize=(6 * len(panels), 5), dpi=100, squeeze=False
        )
        for axis, panel in zip(axes[0], panels, strict=True):
            for number, line in enumerate(panel.lines):
                if line.pairs:
                    points = zip(*sorted(line.pairs), strict=True)
                    axis.plot(
                        *points, "--" if line.dashed else "o-", label=line.label, color=f"C{number}"
                    )
            axis.set_title(panel.title, loc="left", fontweight="bold")
            axis.set_xlabel("requests a second")
            if panel.log:
                axis.set_yscale("log")
            axis.grid(color="#dddddd", lw=0.7)
        axes[0][0].legend(loc="upper left", fontsize=10)
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)
