"""The tests that need a GPU (tests/gpu), a case a file, by pytest in a process of its own."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

from benchmarks.gpu.part import Case, Context, alone
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness import store

FILES = {
    "test_scorings": 60.0,
    "test_planned": 60.0,
    "test_ops": 200.0,
    "test_few_bits": 120.0,
    "test_models": 150.0,
    "test_served": 180.0,
}
DEPENDS = ("pallas_kernels", "jmoe", "serving", "tests/gpu", "benchmarks/kernels")
START_S = 0.0


def cases(sizes: Sizes) -> list[Case]:
    """Returns a case for each test file."""
    return [Case(name, 20.0 if sizes.dry else seconds) for name, seconds in FILES.items()]


def run_tests(context: Context, case: Case) -> dict[str, Any]:
    """Runs the tests of a file; returns counts and what failed. Without a GPU (a dry run) all are
    skipped, which counts as a pass.
    """
    report = context.scratch / f"{case.name}.xml"
    report.unlink(missing_ok=True)
    # The tests' own conftest asks for a CPU and for packages that a bare GPU machine lacks.
    options = ["-q", "--confcutdir", "tests/gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", f"tests/gpu/{case.name}.py", *options]
    platform = "cpu" if context.sizes.dry else "cuda,cpu"
    done = subprocess.run(
        command,
        cwd=store.ROOT,
        env={**os.environ, "JAX_PLATFORMS": platform},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60 + 2 * case.estimate_s,
    )
    if not report.exists():
        return {"failed": f"pytest ended with {done.returncode}: {done.stdout[-600:]}"}
    figures, faults = read_junit(report.read_text(encoding="utf-8"))
    record: dict[str, Any] = {"figures": figures, "faults": faults}
    if faults or done.returncode not in (0, 5):
        record["failed"] = f"{len(faults)} tests failed: {', '.join(list(faults)[:5])}"
    elif not context.sizes.dry and not figures["passed"]:
        record["failed"] = f"no test ran; {figures['skipped']} were skipped"
    return record


session = alone(run_tests)


def read_junit(text: str) -> tuple[dict[str, int], dict[str, str]]:
    """Returns (passed, failed, skipped counts; message by failed test) of a JUnit report."""
    counts, faults = {"passed": 0, "failed": 0, "skipped": 0}, {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        fault = next((e for e in case if e.tag in ("failure", "error")), None)
        if fault is not None:
            counts["failed"] += 1
            faults[case.get("name", "?")] = (fault.get("message") or "")[:400]
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, faults
