"""What the loop of an asynchronous worker costs beside what it launches (AMoE, Figure 13).

`python -m benchmarks.aep_worker [--json FILE]`: 48 MoE layers, 8 picks of 128 experts, an attention
worker and three expert workers in one thread, with the real picker. Devices launch programs that
compute next to nothing on arrays of the right kind, so that what is left is hosts' work. Every
launch is recorded, and the same launches are made once more without the loop: their ratio counts.
Both are repeated in turn.
"""

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.command import write_figures
from jmoe.packed_rows import empty_deltas, pack_row
from serving.bench.facts import commit
from serving.execution.aep.devices import Attended
from serving.execution.aep.local import LocalWorkers
from serving.execution.aep.messages import Unit
from serving.scheduling.layers.picker import make_picker

LAYERS, EXPERTS, PICKS, WIDTH = 48, 128, 8, 8
ROWS = (16, 64, 256)
EXPERT_WORKERS = 3

Launch = tuple[str, Callable[[], Any]]


class Launches:
    """Calls upon devices: made, and kept to be made again."""

    def __init__(self) -> None:
        self.made: list[Launch] = []

    def make(self, kind: str, call: Callable[[], Any]) -> Any:
        """What the call returns."""
        self.made.append((kind, call))
        return call()


@partial(jax.jit, keep_unused=True)
def _stage(x: jax.Array, *given: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """With the arguments of a real one, which have to get to the device."""
    return x + 1, x[:1]


class _Device:
    """Both kinds of device: programs without content."""

    def __init__(self, launches: Launches, seed: int, num_rows: int) -> None:
        self.device = jax.devices()[0]
        self._launches, self._x = launches, jnp.zeros((num_rows, WIDTH))
        rng = np.random.default_rng(seed)
        drawn = [
            np.argsort(rng.random((num_rows, EXPERTS)), axis=1)[:, :PICKS] for _ in range(LAYERS)
        ]
        self._ids = [ids.astype(np.int32) for ids in drawn]

    def attend(
        self, layer: int, tokens: Any, rows: Any, deltas: Any, control: Any, places: Any
    ) -> Attended:
        given = rows, deltas, np.array(control, np.int32), places
        h, _ = self._launches.make("attention stage", lambda: _waited(self._x, *given))
        none = np.zeros(len(places), np.int32)
        return Attended(h, self._ids[layer][: len(places)], none, none)

    def compute(self, layer: int, rows: Any, expert_ids: Any) -> Any:
        return self._launches.make("expert stage", lambda: _stage(self._x, rows, expert_ids)[0])

    def keep(self, *given: Any) -> None:
        self._launches.make("rows that came", lambda: _stage(self._x, *given[1:]))

    def leave(self, rows: Any, places: Any) -> tuple[list[int], list[float]]:
        self._launches.make("head", lambda: _waited(self._x, rows, places))
        return [0] * len(places), [0.0] * len(places)

    def sent(self, rows: Any, at: Any, to: Any) -> Any:
        if at is not None:
            self._launches.make("gather", lambda: _stage(self._x, at))
        return self._launches.make("copy", lambda: jax.device_put(self._x, to))


def _waited(x: jax.Array, *given: np.ndarray) -> tuple[jax.Array, np.ndarray]:
    """A stage whose result its host waits for."""
    h, small = _stage(x, *given)
    return h, np.asarray(small)


def measure(num_rows: int, seed: int) -> dict[str, Any]:
    """One token of `num_rows` sequences: seconds with the loop, and of its launches alone."""
    launches, rng = Launches(), random.Random(seed)
    hosts = np.zeros((LAYERS, EXPERTS, EXPERT_WORKERS), bool)
    hosts[:, np.arange(EXPERTS), np.arange(EXPERTS) % EXPERT_WORKERS] = True
    workers = LocalWorkers(
        [_Device(launches, seed, num_rows)],
        [_Device(launches, seed, num_rows) for _ in range(EXPERT_WORKERS)],
        [True] * LAYERS,
        hosts,
        num_rows,
        lambda: make_picker("defrag"),
        clock=time.perf_counter,
        decode_buckets=(num_rows,),
    )
    for at in range(num_rows):
        row = pack_row(at, kv_len=1)
        workers.submit(0, Unit(row, None, np.array([at], np.int32), empty_deltas(0)))
    began = time.perf_counter()
    while not workers.is_idle:
        workers.turn(rng.randrange(workers.num_workers))
    loop_s = time.perf_counter() - began
    began = time.perf_counter()
    for _, call in launches.made:
        call()
    return {
        "loop_s": loop_s,
        "launches_s": time.perf_counter() - began,
        "launches": dict(Counter(kind for kind, _ in launches.made)),
        "stages": sum(worker.stages for worker in workers.attention + workers.experts),
    }


def main() -> None:
    """Prints the table and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table(title=f"{LAYERS} layers, 1 + {EXPERT_WORKERS} workers in one thread; medians")
    for column in ("rows", "stages", "launches a stage", "stages/s", "loop / launches alone"):
        table.add_column(column)
    found = {}
    for num_rows in ROWS:
        runs = [measure(num_rows, seed) for seed in range(args.repeats + 1)][1:]
        ratio = statistics.median(run["loop_s"] / run["launches_s"] for run in runs)
        rate = statistics.median(run["stages"] / run["loop_s"] for run in runs)
        each = statistics.median(sum(run["launches"].values()) / run["stages"] for run in runs)
        found[num_rows] = {"ratio": ratio, "stages_per_s": rate, "launches_per_stage": each}
        stages = statistics.median(run["stages"] for run in runs)
        table.add_row(str(num_rows), f"{stages:.0f}", f"{each:.1f}", f"{rate:,.0f}", f"{ratio:.2f}")
    Console(width=110).print(table)
    if args.json:
        write_figures(args.json, {"commit": commit(), "rows": found})


if __name__ == "__main__":
    main()
