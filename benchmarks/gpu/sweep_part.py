"""Searches tiles of the kernels, case by case; run only where `--parts sweep` asks for it.

Every tile that is tried is a record in `sweeps.json`, and none is tried again.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.gpu import kernels_part
from benchmarks.gpu.part import Case, Context, RunCase
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness import store
from benchmarks.kernels import judge, problems, sweep
from benchmarks.kernels.cases import all_cases
from benchmarks.kernels.measure import Bench
from benchmarks.kernels.timing import JaxProgram

DEPENDS = kernels_part.DEPENDS
START_S = kernels_part.START_S
TILES = "sweeps"


def cases(sizes: Sizes) -> list[Case]:
    """Returns the cases of kernels whose tiles are searched."""
    every = all_cases(kernels_part.grid_of(sizes))
    searched = (c for c in every if c.op in sweep.AXES and not (c.shape.latent and c.context))
    return [Case(one.name, 240.0) for one in searched]


@contextmanager
def session(context: Context) -> Iterator[RunCase]:
    """Yields what searches the tiles of a case for as long as its estimate."""
    bench = kernels_part.bench_of(context)
    by_name = {one.name: one for one in all_cases(bench.sizes)}

    def run(case: Case) -> dict[str, Any]:
        ends_at, kept = time.monotonic() + case.estimate_s, context.kept
        one = by_name[case.name]
        problem = problems.build(one, bench.sizes, secrets.randbits(31), bench.pools)
        op = sweep.kernel(one)

        def cost(tile: Any) -> float:
            name = f"{case.name} {tile}"
            done = kept.records(TILES).get(name) if kept.has(TILES, name, failed=True) else None
            if done is None:
                if time.monotonic() > ends_at:
                    return math.inf
                record = {"case": {"name": name}, **kept.revision, "tile": str(tile)}
                trial = partial(_timed, bench, problem, partial(op, tile=tile))
                done = store.attempt(kept, TILES, record, trial)
            return done["timing"]["us"] if "timing" in done else math.inf

        tried = list(sweep.search(sweep.chosen(one), sweep.AXES[one.op], cost))
        best, us = min(tried, key=lambda pair: pair[1])
        if us == math.inf:
            return {"failed": "no tile works"}
        return {
            "tile": str(best),
            "figures": {"us": us, "us_before": tried[0][1], "tiles": len(tried)},
            "unfinished": time.monotonic() > ends_at,
        }

    yield run


def _timed(bench: Bench, problem: problems.Problem, op: Callable[..., Any]) -> dict[str, Any]:
    program = JaxProgram(problem.with_op(op), problem.sets)
    seen = judge.check(program, problem.error, problem.tolerance)
    if not seen.passed:
        return {"failed": f"wrong results: {seen}"}
    return {"timing": bench.ruler.measure(program)._asdict()}
