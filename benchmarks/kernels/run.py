"""The command: which cases, one after the other, until done or out of time."""

import argparse
import functools
import math
import secrets
import sys
from dataclasses import asdict
from typing import Any

import jax

from benchmarks.harness import command, store
from benchmarks.kernels import judge, problems, sweep, table
from benchmarks.kernels.cases import DRY, OPS, SOURCES, Case, Sizes, all_cases, target
from benchmarks.kernels.measure import Bench
from benchmarks.kernels.timing import JaxProgram, Ruler, measure_ceilings

SWEEPS = "sweeps"  # the file that tiles go to


def parse(argv: list[str], about: str) -> argparse.Namespace:
    """Parses the command line."""
    parser = command.parser("python -m benchmarks.kernels", about)
    command.add_choices(parser, "--only", OPS)
    parser.add_argument("--model", default="", help="part of a model's name")
    parser.add_argument("--phase", choices=("decode", "prefill"))
    parser.add_argument("--libraries", help="those whose name holds this; '-' for none")
    parser.add_argument("--sweep", action="store_true", help="search tiles")
    return parser.parse_args(argv)


def select(args: argparse.Namespace, sizes: Sizes) -> list[Case]:
    """Returns the cases the command line asks for."""
    return [
        case
        for case in all_cases(sizes)
        if case.op in args.only
        and args.model.lower() in case.shape.name.lower()
        and args.phase in (None, case.phase)
        and args.match in case.name
    ]


def main(argv: list[str], about: str = "") -> int:
    """Runs the command; returns the exit status."""
    args = parse(argv, about)
    sizes = DRY if args.dry_run else Sizes()
    cases = select(args, sizes)
    if args.list:
        for case in cases:
            print(case.name, *(target(case) or ()))
        return 0
    if args.dry_run:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        print(
            "benchmarks.kernels needs a GPU, and JAX sees none here. `--dry-run` runs every case "
            "at tiny sizes on the CPU, to test the program itself.",
            file=sys.stderr,
        )
        return 2
    if args.sweep:
        cases = [c for c in cases if c.op in sweep.AXES and not (c.shape.latent and c.context)]
    return _run(args, sizes, cases)


def _run(args: argparse.Namespace, sizes: Sizes, cases: list[Case]) -> int:
    clock = command.Clock(args.limit_s)
    device = "dry-run" if args.dry_run else jax.devices()[0].device_kind
    dry = store.ROOT / "out" / "kernels-dry-run"
    folder = args.out or (dry if args.dry_run else store.device_folder(device))
    kept = store.Store(folder, store.revision(args.commit, SOURCES))
    if not args.again and not args.sweep:
        there = len(cases)
        cases = [case for case in cases if not kept.has(case.op, case.name)]
        print(f"{there - len(cases)} cases are stored in {folder} for this revision")
    if not cases:
        return 0
    about = {**kept.revision, "machine": store.machine(device)}
    print(" ".join(f"{k} {v}" for k, v in {**kept.revision, **about["machine"]}.items()))
    ruler = Ruler(0.0, 0.0) if args.dry_run else Ruler()
    ceilings = measure_ceilings(ruler, *((1 << 16, 32) if args.dry_run else ()))
    print(
        f"copy {ceilings.copy_tb_s:.3f} TB/s, product {ceilings.product_tflop_s:.1f} TFLOP/s; "
        + ("times by CUPTI" if ruler.reads_kernels else f"times by difference: {ruler.why_not}")
    )
    bench = Bench(sizes, ruler, ceilings, about, args.libraries)
    records = []
    print(table.HEADER)
    for case in cases:
        if not clock.has_time():
            print(f"{len(cases) - len(records)} {command.CALL_AGAIN}")
            break
        if args.sweep:
            records.append(_sweep(bench, kept, case, clock))
        else:
            records.append(_measure(bench, kept, case))
            print(table.line(records[-1]), flush=True)
    print(table.summary(records))
    return int(any("failed" in record for record in records))


def _measure(bench: Bench, kept: store.Store, case: Case) -> dict[str, Any]:
    seed = secrets.randbits(31)
    record = {**_about(bench, case, case.name), "seed": seed}
    return command.attempt(kept, case.op, record, lambda: bench.run(case, seed))


def _about(bench: Bench, case: Case, name: str) -> dict[str, Any]:
    return {"case": {**asdict(case), "name": name}, **bench.about, "date": store.now()}


def _sweep(bench: Bench, kept: store.Store, case: Case, clock: command.Clock) -> dict[str, Any]:
    """Searches tiles for a case; returns the record of the best. Every tile that is tried is
    stored.
    """
    problem = problems.build(case, bench.sizes, secrets.randbits(31), bench.pools)
    op = sweep.kernel(case)

    def cost(tile: Any) -> float:
        name = f"{case.name} {tile}"
        done = kept.records(SWEEPS).get(name) if kept.has(SWEEPS, name, failed=True) else None
        if done is None:
            if not clock.has_time():
                return math.inf
            record = {**_about(bench, case, name), "tile": sweep.stored(tile)}
            trial = functools.partial(_try, bench, problem, functools.partial(op, tile=tile))
            done = command.attempt(kept, SWEEPS, record, trial)
        return done["timing"]["us"] if "timing" in done else math.inf

    tried = dict(sweep.search(sweep.chosen(case), sweep.AXES[case.op], cost))
    measured = {tile: us for tile, us in tried.items() if us < math.inf}
    if not measured:
        return {"case": {"name": case.name}, "failed": "no tile works"}
    start_us, best = next(iter(tried.values())), min(measured, key=lambda tile: measured[tile])
    print(
        f"{case.name}: {start_us:.2f} us as it is, best of {len(measured)} "
        f"{measured[best]:.2f} us: {best}",
        flush=True,
    )
    return {"case": {"name": case.name}}


def _try(bench: Bench, problem: problems.Problem, op: Any) -> dict[str, Any]:
    try:
        program = JaxProgram(problem.with_op(op), problem.sets)
        seen = judge.check(program, problem.error, problem.tolerance)
        if not seen.passed:
            return {"failed": f"wrong results: {seen}"}
        return {"timing": bench.ruler.measure(program)._asdict()}
    except Exception as error:  # most often a tile that does not fit
        return {"failed": command.reason(error)}
