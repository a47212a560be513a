"""One case, from inputs to a record: correct first, then timed, then the libraries."""

import gc
from dataclasses import dataclass, field
from typing import Any

import jax

from benchmarks.kernels import inputs, judge, libraries, problems, roofline, sweep
from benchmarks.kernels.cases import Case, Sizes, target
from benchmarks.kernels.roofline import assumptions
from benchmarks.kernels.timing import Ceilings, JaxProgram, Program, Ruler, Timing


@dataclass(frozen=True)
class Bench:
    """What the cases of one run share."""

    sizes: Sizes
    ruler: Ruler
    ceilings: Ceilings
    pools: inputs.Pools = field(default_factory=inputs.Pools)

    def run(self, case: Case, seed: int) -> dict[str, Any]:
        """Checks and times a case; returns what its record holds, `failed` among it if results are
        wrong.
        """
        try:
            return self._measured(case, seed)
        except Exception:
            self.pools.drop()
            raise
        finally:
            gc.collect()  # gigabytes of inputs

    def _measured(self, case: Case, seed: int) -> dict[str, Any]:
        record: dict[str, Any] = {"seed": seed, "ceilings": self.ceilings._asdict()}
        with assumptions.on(jax.devices()[0].device_kind) as device:
            record["expected"] = {
                **roofline.predict(case, self.sizes).record(),
                "expected_of": device,
            }
        problem = problems.build(case, self.sizes, seed, self.pools)
        program = JaxProgram(problem.call, problem.sets, problem.carry)
        record["implementation"] = "mosaic" if program.has_mosaic else "xla"
        record["tile"] = str(sweep.chosen(case)) if program.has_mosaic else None
        record["facts"] = problem.facts
        seen = judge.check(program, problem.error, problem.tolerance)
        record["check"] = {**seen._asdict(), "passed": seen.passed}
        if not seen.passed:
            record["failed"] = "wrong results: see check"
            return record
        timing = self.ruler.measure(program)
        record["timing"] = timing._asdict()
        expected_us = record["expected"]["expected_us"]
        values = record["figures"] = {"us": timing.us, "expected_us": expected_us}
        if problem.count is not None:
            record["count"] = problem.count._asdict()
            values |= figures(*problem.count, timing.us, self.ceilings)
        record["target"] = judged_target(case, values)
        del program
        found = record["libraries"] = self._libraries(case, problem, timing)
        values |= {f"{n} over it": one["ratio"] for n, one in found.items() if "ratio" in one}
        return record

    def _libraries(
        self, case: Case, problem: problems.Problem, ours: Timing
    ) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, make in libraries.of(case):
            try:
                found[name] = self._library(make(case, problem), problem, ours)
            except Exception as error:  # most are not there, or cannot take the case
                found[name] = {"skipped": _reason(error)}
        return found

    def _library(self, program: Program, problem: problems.Problem, ours: Timing) -> dict[str, Any]:
        error = None
        out = program(0)
        program.wait(out)
        if program.judged:
            error = problem.error(out if isinstance(out, jax.Array | tuple) else _lent(out))
            if not error <= problem.tolerance:
                return {"skipped": f"wrong results: error {error:.2g}"}
        del out
        timing = self.ruler.measure(program)
        return {"error": error, "ratio": timing.us / ours.us, "timing": timing._asdict()}


def _lent(out: Any) -> jax.Array:
    from benchmarks.kernels.torch_libraries import to_jax

    return to_jax(out)


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    if isinstance(error, libraries.Skip):
        return text
    return f"{type(error).__name__}: {text}"


def figures(num_bytes: int, flops: int, us: float, ceilings: Ceilings) -> dict[str, float]:
    """Returns rates, and shares of the measured ceilings.

    `share_of_floor` is that of the larger of the two least times, by bytes and by products.
    """
    tb_s, tflop_s = num_bytes / us / 1e6, flops / us / 1e6
    by_bytes, by_products = tb_s / ceilings.copy_tb_s, tflop_s / ceilings.product_tflop_s
    return {
        "tb_s": tb_s,
        "tflop_s": tflop_s,
        "share_of_copy": by_bytes,
        "share_of_product": by_products,
        "share_of_floor": max(by_bytes, by_products),
    }


def judged_target(case: Case, values: dict[str, float]) -> dict[str, Any] | None:
    """Returns the case's target and whether it was met; None where it has none."""
    goal = target(case)
    if goal is None:
        return None
    return {goal.figure: goal.at_least, "met": values[goal.figure] >= goal.at_least}
