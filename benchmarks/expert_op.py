"""Cost of the routed-expert op by the number of experts that have visits, and by block height.

`python -m benchmarks.expert_op [--repeats 30]` on a CPU, in float32, at the bundled model's layer:
60 experts of 128 x 96, 64 rows of four picks. The 256 visits stay; what changes is over how many
experts they are spread, as under brownout. Variants take turns, so that a disturbance meets all of
them; a figure is a median. `--cpu-time` counts the process's own time, for a machine that is not
idle.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_gemm, routing
from pallas_kernels.shapes import BUNDLED as SHAPE

NUM_ROWS = 64
ACTIVE = (60, 46, 30, 16, 8, 4)
BLOCK_M = (8, 16, 32)


def spread(num_rows: int, active: int, seed: int) -> np.ndarray:
    """int32 [rows, picks]: distinct picks a row, every one of `active` experts about as often."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(SHAPE.num_experts)[:active]
    first = np.arange(num_rows)[:, None] * SHAPE.top_k + np.arange(SHAPE.top_k)
    return chosen[first % active].astype(np.int32)


def make_run(ids: np.ndarray, block_m: int, clock: Callable[[], float]) -> Callable[[], float]:
    """A call that returns the microseconds of one run of the op, compiled and warm."""
    rng = np.random.default_rng(0)
    d, f, m = SHAPE.d_model, SHAPE.d_ff, SHAPE.num_experts
    x, gate_up, down = (
        jnp.asarray(rng.normal(size=size), jnp.float32)
        for size in ((len(ids), d), (m, d, 2 * f), (m, f, d))
    )
    weights = jnp.ones(ids.shape, jnp.float32)
    slots = jnp.arange(m, dtype=jnp.int32)
    work = routing.dispatch(jnp.asarray(ids), weights, slots, block_m=block_m, max_active=m)
    op = jax.jit(grouped_gemm.moe_mlp)
    jax.block_until_ready(op(x, gate_up, down, work))

    def run() -> float:
        start = clock()
        jax.block_until_ready(op(x, gate_up, down, work))
        return 1e6 * (clock() - start)

    return run


def measure(runs: dict[object, Callable[[], float]], repeats: int) -> dict[object, float]:
    """Median microseconds of each run; the runs take turns."""
    samples: dict[object, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(run())
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    repeats, clock = args.repeats, time.process_time if args.cpu_time else time.perf_counter
    device = jax.devices()[0]
    print(f"{SHAPE.name}: d {SHAPE.d_model}, f {SHAPE.d_ff}, {SHAPE.num_experts} experts, ", end="")
    print(f"{NUM_ROWS * SHAPE.top_k} visits, float32, {device.platform}, ", end="")
    print(f"medians of {repeats}{', CPU time' if args.cpu_time else ''}\n")

    block_m = grouped_gemm.BLOCK_M
    runs = {n: make_run(spread(NUM_ROWS, n, n), block_m, clock) for n in ACTIVE}
    cost = measure(runs, repeats)
    print("| active experts | time, us | all / this |\n|---|---|---|")
    for active in ACTIVE:
        print(f"| {active} | {cost[active]:.0f} | {cost[ACTIVE[0]] / cost[active]:.2f} |")

    print("\n| rows | block height " + "".join(f"| {n} rows " for n in BLOCK_M) + "|")
    print("|---|---" + "|---" * len(BLOCK_M) + "|")
    for num_rows in (8, 64, 512):
        ids = spread(num_rows, SHAPE.num_experts, 0)
        cost = measure({n: make_run(ids, n, clock) for n in BLOCK_M}, repeats)
        print(f"| {num_rows} | us " + "".join(f"| {cost[n]:.0f} " for n in BLOCK_M) + "|")


if __name__ == "__main__":
    main()
