"""The kernel benchmark (`python -m benchmarks.kernels`), one case an op; it keeps its own files."""

import subprocess
import sys
from typing import Any

from benchmarks.gpu.part import Case, Context, alone
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness import store
from benchmarks.harness.command import CALL_AGAIN
from benchmarks.kernels.cases import OPS, SOURCES

DEPENDS = (
    "pallas_kernels",
    "benchmarks/kernels",
    "benchmarks/mesh/rates.py",
    "benchmarks/gpu/kernels_part.py",
)
START_S = 0.0
SECONDS = {"grouped_gemm": 80.0, "paged_attention": 60.0, "prefill_attention": 60.0}
"""Given to an op, others 40; what it does not finish is left for the next call."""


def cases(sizes: Sizes) -> list[Case]:
    """Returns a case for each op."""
    return [Case(op, 30.0 if sizes.dry else SECONDS.get(op, 40.0)) for op in OPS]


def run_op(context: Context, case: Case) -> dict[str, Any]:
    """Runs an op's cases; returns how many are stored, and how many of their targets were met."""
    command = [sys.executable, "-m", "benchmarks.kernels", "--only", case.name]
    command += ["--out", str(context.kept.folder), "--limit-s", str(case.estimate_s)]
    command += ["--commit", context.commit]
    command += ["--dry-run"] if context.sizes.dry else []
    limit_s = 60 + 2 * case.estimate_s
    done = subprocess.run(command, cwd=store.ROOT, capture_output=True, text=True, timeout=limit_s)
    lines = done.stdout.strip().splitlines()
    left = next((line for line in lines if line.endswith(CALL_AGAIN)), None)
    now = store.revision(context.commit, SOURCES)
    found = context.kept.records(case.name).values()
    records = [r for r in found if all(r[key] == value for key, value in now.items())]
    targets = [r["target"] for r in records if r.get("target")]
    record: dict[str, Any] = {
        "figures": {
            "stored": len(records),
            "failed_cases": sum("failed" in r for r in records),
            "targets": len(targets),
            "targets_met": sum(t["met"] for t in targets),
        },
        "summary": lines[-12:],
    }
    if done.returncode:
        record["failed"] = f"status {done.returncode}: {(done.stderr or done.stdout)[-400:]}"
    elif left:
        record["unfinished"] = left
    return record


session = alone(run_op)
