"""Pictures for notebooks: router loads, losses, latency over time, who owns which expert.

Each draws into a matplotlib Axes, or into the current one, and returns it. Needs `jmoe[plot]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jmoe.extras import need


def router_loads(expert_rows: Int[np.ndarray, "L E"], ax: Any = None) -> Any:
    """Draws how a layer's rows fall to its experts, each layer's busiest first, as shares of an
    even load.

    `expert_rows` are those of `ForwardStats`, of routed experts alone or with united ones.
    """
    ax = _axes(ax)
    rows = np.sort(np.asarray(expert_rows, float), axis=1)[:, ::-1]
    shares = rows / np.maximum(rows.mean(axis=1, keepdims=True), 1e-12)
    image = ax.imshow(shares, aspect="auto", cmap="magma", vmin=0, interpolation="nearest")
    ax.set(xlabel="expert, the busiest first", ylabel="MoE layer", yticks=range(len(shares)))
    ax.figure.colorbar(image, ax=ax, label="rows, of an even load")
    return ax


def losses(
    curves: Mapping[str, Sequence[tuple[float | int, float]]],
    ax: Any = None,
    *,
    over: str = "threshold, percent",
) -> Any:
    """Draws what brownout loses, a curve of (x, loss in nats a token) for each name. `over` says
    what x is.
    """
    ax = _axes(ax)
    for name, points in curves.items():
        ax.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name)
    ax.set(xlabel=over, ylabel="loss, nats a token")
    return _finished(ax)


def p90_over_time(
    runs: Mapping[str, tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]],
    slo_ms: float,
    ax: Any = None,
    *,
    window_s: float = 1.0,
) -> Any:
    """Draws the P90 of what came in the last `window_s` seconds, in ms, and the objective.

    A run is (seconds at which something came, ms that it took), in any order.
    """
    ax = _axes(ax)
    for name, (at_s, took_ms) in runs.items():
        order = np.argsort(at_s)
        at_s, took_ms = np.asarray(at_s)[order], np.asarray(took_ms)[order]
        first = np.searchsorted(at_s, at_s - window_s, side="right")
        p90 = [
            np.percentile(took_ms[begin : end + 1], 90, method="higher")
            for end, begin in enumerate(first)
        ]
        ax.plot(at_s, p90, label=name)
    ax.axhline(slo_ms, color="black", linestyle="--", linewidth=1, label="objective")
    ax.set(xlabel="seconds", ylabel=f"P90 of the last {window_s:g} s, ms")
    return _finished(ax)


def expert_map(owners: Int[np.ndarray, "N L m"], names: Sequence[str], ax: Any = None) -> Any:
    """Draws, for every model of a family, whose expert stands at each position of each layer
    (`jmoe.Sharing.owners`): a row of pictures in one, a model below the other.
    """
    ax = _axes(ax)
    owners = np.asarray(owners)
    models, layers, experts = owners.shape
    colors = _pyplot().get_cmap("tab10", 10)
    image = owners.reshape(models * layers, experts)
    ax.imshow(image, aspect="auto", cmap=colors, vmin=-0.5, vmax=9.5, interpolation="nearest")
    for model in range(1, models):
        ax.axhline(model * layers - 0.5, color="white", linewidth=3)
    middles = [model * layers + (layers - 1) / 2 for model in range(models)]
    ax.set(xlabel="expert", yticks=middles, yticklabels=names)
    for owner, name in enumerate(names):
        ax.plot([], [], "s", color=colors(owner), label=f"expert of {name}")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def _finished(ax: Any) -> Any:
    """Returns the Axes of some curves from 0 on, with a grid and their names."""
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend()
    return ax


def _axes(ax: Any) -> Any:
    return _pyplot().gca() if ax is None else ax


def _pyplot() -> Any:
    need("plot", "matplotlib")
    from matplotlib import pyplot

    return pyplot
