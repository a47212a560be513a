"""One picture: ratios by load, throughput against ITL, queue depths, rates in and out."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws the parts that are there."""
    figure, axes = plt.subplots(3, 3, figsize=(16, 13), layout="constrained")
    if "eight" in found:
        _ratios(axes[0, 0], found["eight"])
    if "host" in found:
        _host(axes[0, 1], found["host"])
    if "paper" in found:
        _curves(axes[0, 2], found["paper"]["curves"])
    if "waves" in found:
        for axis, one in zip(axes[1], found["waves"]["depths"], strict=True):
            _depths(axis, one)
        for axis, one in zip(axes[2], found["waves"]["rates"], strict=False):
            _rates(axis, one)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _ratios(axis: Any, cases: list[dict[str, Any]]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for case in cases:
        if case["skew"] == 0.5 and not case["same"]:
            name = f"{case['model']} top-{case['top_k']}"
            lines.setdefault(name, []).append((case["in_flight"], case["ratio"]))
    for name, points in lines.items():
        axis.plot(*zip(*points, strict=True), "o-", label=name)
    axis.axhline(1, color="grey", lw=0.8)
    axis.set(xscale="log", xlabel="tokens in flight", ylabel="tokens/s over synchronous")
    axis.set_title("Asynchronous over ideal synchronous, 8 H200,\nskew 0.5, layers differ")
    axis.legend()


def _host(axis: Any, rows: list[dict[str, Any]]) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        points = [(r["host_us"], r["ratio"]) for r in rows if r["model"] == model]
        axis.plot(*zip(*points, strict=True), "o-", label=model)
    axis.axhline(1, color="grey", lw=0.8)
    axis.set(xlabel="host a stage, us", ylabel="tokens/s over synchronous")
    axis.set_title("What a launch may cost\n(8,192 in flight)")
    axis.legend()


def _curves(axis: Any, points: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(point["system"] for point in points):
        line = [(p["tokens_per_s"] / 1e3, p["itl_ms"]) for p in points if p["system"] == name]
        axis.plot(*zip(*line, strict=True), "o-", label=name)
    axis.set(xlabel="thousands of tokens/s", ylabel="mean ITL, ms", yscale="log")
    axis.set_title("The paper's machine: ITL by throughput\n(figures 9 and 11), top-1")
    axis.legend()


def _depths(axis: Any, one: dict[str, Any]) -> None:
    depths = np.array(one["depths"]).T
    length_ms = depths.shape[1] * one["every_ms"]
    extent = (0, length_ms, -0.5, len(depths) - 0.5)
    image = axis.imshow(depths, aspect="auto", origin="lower", extent=extent, cmap="viridis")
    axis.set(xlabel="ms", ylabel="layer")
    axis.set_title(f"Rows before each layer of an attention worker: {one['rule']}\n(figure 7)")
    axis.figure.colorbar(image, ax=axis)


def _rates(axis: Any, one: dict[str, Any]) -> None:
    at_s = (np.arange(len(one["out_tokens_per_s"])) + 1) * one["bin_s"]
    axis.axhline(one["in_tokens_per_s"] / 1e3, color="grey", label="in")
    axis.plot(at_s, np.array(one["out_tokens_per_s"]) / 1e3, label="out")
    axis.set(xlabel="s", ylabel="thousands of tokens/s", ylim=(0, None))
    aged = f"max_age_s {one['max_age_s']:g}" if one["max_age_s"] < 10 else "without ageing"
    axis.set_title(f"Requests in, tokens out: {one['rule']}, {aged}\n(figure 12)")
    axis.legend()
