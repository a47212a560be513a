"""The picture: accuracy over threshold, one line a way, after BrownoutServe's figure 10."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jmoe.extras import pyplot
from training.evaluation.items import kind_of
from training.evaluation.tables import Score

# Ways in blues, from few to many experts a united one; dropping is another thing and another hue.
_WAY_COLORS = ("#0b3c6f", "#2f7fc1", "#e08e0b", "#1b7f5c", "#7a3e9d", "#6b4f2a")
_FULL_COLOR, _ZERO_COLOR = "#c1121f", "#777777"
_MARKERS = "os^Dv<"


def draw(found: Sequence[Score], path: Path, title: str) -> None:
    """Writes a PNG: the mean over families large, and each family small where there are several."""
    plt = pyplot()

    families = list(found[0].families)
    small = families if len(families) > 1 else []
    down = -(-len(small) // 2)
    with plt.rc_context({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}):
        figure = plt.figure(figsize=(16, max(7, 2.2 * down)) if small else (10, 7), dpi=100)
        across = 4 if small else 1
        grid = figure.add_gridspec(max(down, 1), across)
        large = figure.add_subplot(grid[:, :2] if small else grid[:, :])
        _draw_panel(large, found, lambda score: score.accuracy)
        large.set_xlabel("threshold, percent of visits kept exact")
        large.set_ylabel("right answers, %, with paired 95 % intervals")
        intervals = [_interval(score) for score in found[1:]]
        for score, (low, high) in zip(found[1:], intervals, strict=True):
            color = _colors(found)[kind_of(score.setting)]
            large.plot([score.setting.threshold_percent] * 2, [low, high], color=color, lw=1)
        large.legend(loc="lower left", frameon=False)
        for i, family in enumerate(small):
            axis = figure.add_subplot(grid[i // 2, 2 + i % 2], sharex=large, sharey=large)
            _draw_panel(axis, found, lambda score, name=family: score.families[name], small=True)
            axis.set_title(family, loc="left", fontsize=12)
            axis.tick_params(labelleft=i % 2 == 0, labelbottom=i >= len(small) - 2, labelsize=10)
        figure.suptitle(title, x=0.01, ha="left", fontsize=16, fontweight="bold")
        figure.tight_layout(rect=(0, 0, 1, 0.97))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _colors(found: Sequence[Score]) -> dict[str, str]:
    kinds = list(dict.fromkeys(kind_of(score.setting) for score in found[1:]))
    ways = [kind for kind in kinds if kind != "full"]
    colors = {way: _WAY_COLORS[i % len(_WAY_COLORS)] for i, way in enumerate(ways)}
    return colors | {"full": _FULL_COLOR}


def _interval(score: Score) -> tuple[float, float]:
    """Returns the loss's interval on the accuracy axis: zero brownout's own
    uncertainty left out.
    """
    kept = 1 - score.loss_percent / 100
    zero = 100 * score.accuracy / kept if kept > 0 else 0.0
    return zero * (1 - score.high_percent / 100), zero * (1 - score.low_percent / 100)


def _draw_panel(
    axis: Any, found: Sequence[Score], value: Callable[[Score], float], small: bool = False
) -> None:
    zero, colors = found[0], _colors(found)
    axis.axhline(100 * value(zero), color=_ZERO_COLOR, ls="--", lw=1.2, label="zero brownout")
    for marker, (kind, color) in zip(_MARKERS * 9, colors.items(), strict=False):
        line = sorted(
            (score.setting.threshold_percent, 100 * value(score))
            for score in found[1:]
            if kind_of(score.setting) == kind
        )
        if line:
            axis.plot(
                *zip(*line, strict=True),
                color=color,
                lw=1.4 if small else 2.2,
                marker=marker,
                ms=3 if small else 6,
                label="full brownout" if kind == "full" else kind,
            )
    axis.set_xlim(103, -3)
    axis.set_ylim(-3, 103)
    axis.grid(axis="y", color="#dddddd", lw=0.7)
