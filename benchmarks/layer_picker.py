"""Decisions a second of the schedulers of asynchronous expert parallelism, on one core.

    python -m benchmarks.layer_picker --json benchmarks/layer_picker.json

48 layers x 16 groups; half of the queues hold 1 to 64 rows, newly drawn for each of 256 decisions
in a round. A decision is a call of `LayerPicker.pick` from Python, ageing and waiting included. The
best and the median round, in processor time, since other programs share the cores.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import store
from benchmarks.harness.command import markdown, write_figures
from serving.scheduling.layers import compiled
from serving.scheduling.layers.picker import LayerPicker, Waiting
from serving.scheduling.layers.rules import Defragging, FirstLayerFirst, MostTokensFirst

LAYERS, GROUPS, SCENES = 48, 16, 256
RULES = {
    "mtfs": MostTokensFirst(),
    "flfs": FirstLayerFirst(),
    "defrag, K = 4": Defragging(4),
    "defrag, K = 16": Defragging(16),
}
TARGET_PER_S = 200_000  # of the paper's Algorithm 1, with numba


def measure(rule: str, use_numba: bool, rounds: int) -> dict[str, Any]:
    """Decisions a second of a rule: best and median round."""
    rng = np.random.default_rng(20)
    shape = (SCENES, LAYERS, GROUPS)
    counts = rng.integers(1, 65, shape) * (rng.random(shape) < 0.5)
    oldest = rng.random(shape)
    picker = LayerPicker(RULES[rule], Waiting(8, 0.5, 10.0), use_numba=use_numba)
    scenes = list(zip(counts, oldest, strict=True))
    picker.pick(*scenes[0], 1.0)
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for one in scenes:
            picker.pick(*one, 1.0)
        times.append(time.thread_time() - start)
    return {
        "rule": rule,
        "numba": use_numba,
        "best_per_s": SCENES / min(times),
        "median_per_s": SCENES / statistics.median(times),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ways = [True, False] if compiled.AVAILABLE else [False]
    rows = [
        measure(rule, way, args.rounds if way else max(args.rounds // 20, 1))
        for way in ways
        for rule in RULES
    ]
    cells = [
        [r["rule"], "numba" if r["numba"] else "NumPy", *(f"{r[k]:,.0f}" for k in list(r)[2:])]
        for r in rows
    ]
    print("\n".join(markdown(["rule", "", "best a second", "median a second"], cells)))
    if args.json:
        found = {
            "commit": store.commit(),
            "date": store.now(),
            "machine": store.machine("cpu"),
            "machine_load": os.getloadavg()[0],
            "cores": os.cpu_count(),
            "layers": LAYERS,
            "groups": GROUPS,
            "target_per_s": TARGET_PER_S,
            "decisions": rows,
        }
        write_figures(args.json, found)


if __name__ == "__main__":
    main()
