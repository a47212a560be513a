"""An expert that is known by a low-rank difference: made of it in a slot, or computed beside it.

`python -m benchmarks.residuals [--json FILE]` on a CPU, float32, experts of the bundled model's
size and of Qwen1.5-MoE's. In a slot: what it takes to make one expert (jmoe does that), beside what
it takes to copy one from host memory. Beside the grouped GEMM: each visit's rows go through the
factors, too, before and behind the activation; here only, to see what that would cost a step. Each
pair is timed in turn; figures are medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from benchmarks.harness.command import write_figures
from benchmarks.pairs.steps import spread
from jmoe.away import OnHost
from jmoe.experts import ExpertPool
from jmoe.residuals import ByDifference, Residuals
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.shapes import BUNDLED, QWEN15_MOE_A27B
from serving.bench.facts import commit

RANK = 8
ROWS = (1, 8, 64)
SIZES = (BUNDLED, QWEN15_MOE_A27B)  # both 60 experts, 4 a row


def beside(x: Any, pool: ExpertPool, residuals: Residuals, plan: routing.Dispatch) -> jax.Array:
    """The reference of the grouped GEMM with each slot's difference; slot s has difference s."""
    num_rows, num_blocks = plan.row_token.shape[0], plan.block_slot.shape[0]
    block_m = num_rows // num_blocks
    rows = jnp.take(x, plan.row_token, axis=0, mode="fill", fill_value=0)
    up_left, up_right, down_left, down_right = residuals

    def one_block(state):
        block, out = state
        slot, start = plan.block_slot[block], block * block_m
        h = lax.dynamic_slice_in_dim(rows, start, block_m)
        h = h @ pool.gate_up[slot] + (h @ up_left[slot]) @ up_right[slot]
        gate, up = jnp.split(h, 2, axis=1)
        h = jax.nn.silu(gate) * up
        h = h @ pool.down[slot] + (h @ down_left[slot]) @ down_right[slot]
        return block + 1, lax.dynamic_update_slice_in_dim(out, h, start, 0)

    out = jnp.zeros((num_rows, x.shape[1]), jnp.float32)
    start = (jnp.int32(0), out)
    _, out = lax.while_loop(lambda state: state[0] < plan.num_blocks, one_block, start)
    visits = jnp.take(out, plan.visit_row, axis=0, mode="fill", fill_value=0)
    return jnp.einsum("tk,tkd->td", plan.visit_weight, visits)


def medians(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Microseconds of each, which take turns; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            found[name].append(1e6 * (time.perf_counter() - began))
    return {name: statistics.median(own[1:]) for name, own in found.items()}


def measure(shape: Any, repeats: int) -> dict[str, Any]:
    """Figures of one size of experts."""
    rng = np.random.default_rng(0)
    d, f, m = shape.d_model, shape.d_ff, shape.num_experts

    def drawn(*size: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size, np.float32) / np.sqrt(size[-2]))

    factors = (m, d, RANK), (m, RANK, 2 * f), (m, f, RANK), (m, RANK, d)
    residuals = Residuals(*(drawn(*size) for size in factors))
    held = ExpertPool(drawn(m + 1, d, 2 * f), drawn(m + 1, f, d))
    expert, slot = (1, 0, 0), m
    parts = np.asarray(held.gate_up[0]), np.asarray(held.down[0])
    sources = {
        "made of a difference": ByDifference(residuals, {expert: 1}, {expert: 0}),
        "copied from host memory": OnHost({expert: parts}),
    }

    def written(source: Any) -> ExpertPool:
        nonlocal held
        held = source.write(held, expert, slot)
        return held

    own: dict[str, Callable[[], Any]] = {
        name: lambda source=source: written(source) for name, source in sources.items()
    }
    found: dict[str, Any] = {
        "model": shape.name,
        "expert_bytes": sum(part.nbytes for part in parts),
        "one_expert_us": medians(own, repeats),
        "op_us": {},
    }
    plain, with_differences = jax.jit(grouped_gemm.moe_mlp), jax.jit(beside)
    for num_rows in ROWS:
        ids = jnp.asarray(spread(num_rows, m, 0))
        work = routing.dispatch(
            ids,
            jnp.ones(ids.shape, jnp.float32),
            jnp.arange(m, dtype=jnp.int32),
            block_m=grouped_gemm.BLOCK_M,
            max_active=m,
        )
        x = drawn(num_rows, d)
        found["op_us"][num_rows] = medians(
            {
                "alone": lambda x=x, work=work: plain(x, held.gate_up, held.down, work),
                "with differences": lambda x=x, work=work: with_differences(
                    x, held, residuals, work
                ),
            },
            repeats,
        )
    return found


def main() -> None:
    """Prints the table and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table(title=f"rank {RANK}, float32, {jax.devices()[0].platform}; medians, us")
    for column in ("experts of", "one made", "one copied", *(f"op, {n} rows" for n in ROWS)):
        table.add_column(column)
    records = [measure(shape, args.repeats) for shape in SIZES]
    for record in records:
        one = [f"{value:.0f}" for value in record["one_expert_us"].values()]
        ops = [
            f"{alone:.0f}, beside {both:.0f}: {both / alone:.2f}"
            for alone, both in (own.values() for own in record["op_us"].values())
        ]
        table.add_row(record["model"], *one, *ops)
    Console(width=140).print(table)
    if args.json:
        write_figures(args.json, {"commit": commit(), "rank": RANK, "sizes": records})


if __name__ == "__main__":
    main()
