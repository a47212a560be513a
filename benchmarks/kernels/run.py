"""The command: which cases, one after the other, until done or out of time."""

import argparse
import functools
import math
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks.kernels import judge, problems, store, sweep, table
from benchmarks.kernels.cases import DRY, OPS, Case, Sizes, all_cases, target
from benchmarks.kernels.measure import Bench
from benchmarks.kernels.timing import JaxProgram, Ruler, measure_ceilings

SWEEPS = "sweeps"  # the file that tiles go to


def parse(argv: list[str], about: str) -> argparse.Namespace:
    """The command line."""
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=words)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(OPS), help="ops")
    parser.add_argument("--model", default="", help="part of a model's name")
    parser.add_argument("--phase", choices=("decode", "prefill"))
    parser.add_argument("--match", default="", help="part of a case's name")
    parser.add_argument("--libraries", help="those whose name holds this; '-' for none")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no case beyond it")
    parser.add_argument("--out", type=Path, help="folder; default: benchmarks/<device>")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--again", action="store_true", help="also what is stored already")
    parser.add_argument("--sweep", action="store_true", help="search tiles")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU: tests this program")
    parser.add_argument("--list", action="store_true", help="print cases and targets, run nothing")
    args = parser.parse_args(argv)
    for op in args.only:
        if op not in OPS:
            parser.error(f"--only: {op!r} is none of {', '.join(OPS)}")
    return args


def select(args: argparse.Namespace, sizes: Sizes) -> list[Case]:
    """The cases the command line asks for."""
    return [
        case
        for case in all_cases(sizes)
        if case.op in args.only
        and args.model.lower() in case.shape.name.lower()
        and args.phase in (None, case.phase)
        and args.match in case.name
    ]


def main(argv: list[str], about: str = "") -> int:
    """Runs; the exit status."""
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
        cases = [case for case in cases if case.op in sweep.AXES]
    return _run(args, sizes, cases)


def _run(args: argparse.Namespace, sizes: Sizes, cases: list[Case]) -> int:
    clock = Clock(args.limit_s)
    device = "dry-run" if args.dry_run else jax.devices()[0].device_kind
    dry = store.ROOT / "out" / "kernels-dry-run"
    folder = args.out or (dry if args.dry_run else store.device_folder(device))
    kept = store.Store(folder, store.revision(args.commit))
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
        + ("times by CUPTI" if ruler.cupti else f"times by difference: {ruler.why_not}")
    )
    bench = Bench(sizes, ruler, ceilings, about, args.libraries)
    records = []
    print(table.HEADER)
    for case in cases:
        if not clock.has_time():
            print(f"out of time: {len(cases) - len(records)} cases left; call again")
            break
        if args.sweep:
            records.append(_sweep(bench, kept, case, clock))
        else:
            records.append(bench.run(case, secrets.randbits(31)))
            kept.put(case.op, records[-1])
            print(table.line(records[-1]), flush=True)
    print(table.summary(records))
    return int(any("failed" in record for record in records))


class Clock:
    """Says when to stop, so that the longest piece of work so far would still fit."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s
        self._last = time.monotonic()
        self._longest = 0.0

    def has_time(self) -> bool:
        """To be asked before each piece of work."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        return now + self._longest < self._end


def _sweep(bench: Bench, kept: store.Store, case: Case, clock: Clock) -> dict[str, Any]:
    """Searches tiles for a case; the record of the best. Every tile that is tried is stored."""
    problem = problems.build(case, bench.sizes, secrets.randbits(31), bench.pools)
    op = sweep.kernel(case)

    def cost(tile: Any) -> float:
        name = f"{case.name} {tile}"
        done = kept.records(SWEEPS).get(name) if kept.has(SWEEPS, name, failed=True) else None
        if done is None:
            if not clock.has_time():
                return math.inf
            done = {
                "case": {**asdict(case), "name": name},
                **bench.about,
                "date": store.now(),
                "tile": sweep.stored(tile),
                "failed": "it was started, and no more is known",  # a kernel may hang
            }
            kept.put(SWEEPS, done)
            done = {**done, **_try(bench, problem, functools.partial(op, tile=tile))}
            if "timing" in done:
                del done["failed"]
            kept.put(SWEEPS, done)
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
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
