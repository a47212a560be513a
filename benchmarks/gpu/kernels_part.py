"""Every kernel at full size: checked against float32, then timed beside libraries and ceilings."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.part import Case, Context, RunCase
from benchmarks.gpu.sizes import Sizes
from benchmarks.kernels import cases as grid
from benchmarks.kernels.measure import Bench
from benchmarks.kernels.timing import Ruler, measure_ceilings

DEPENDS = ("pallas_kernels", "benchmarks/kernels", "benchmarks/mesh/rates.py")
START_S = 30.0


def cases(sizes: Sizes) -> list[Case]:
    """Returns every case of the grid, those with a target first."""
    return [Case(one.name, 10.0, asdict(one)) for one in grid.all_cases(grid_of(sizes))]


def grid_of(sizes: Sizes) -> grid.Sizes:
    """Returns the sizes of the kernels' cases."""
    return grid.DRY if sizes.dry else grid.Sizes()


def bench_of(context: Context) -> Bench:
    """Returns what measures cases, beside the device's ceilings as measured now."""
    sizes = context.sizes
    ruler = Ruler(0.0, 0.0) if sizes.dry else Ruler()
    ceilings = measure_ceilings(ruler, sizes.copy_bytes, 32 if sizes.dry else 8192)
    print(f"times by {'CUPTI' if ruler.reads_kernels else f'difference: {ruler.why_not}'}")
    return Bench(grid_of(sizes), ruler, ceilings)


@contextmanager
def session(context: Context) -> Iterator[RunCase]:
    """Yields what runs a case; neighbouring cases share a model's weights."""
    bench = bench_of(context)
    by_name = {one.name: one for one in grid.all_cases(bench.sizes)}

    def run(case: Case) -> dict[str, Any]:
        return bench.run(by_name[case.name], secrets.randbits(31))

    yield run
