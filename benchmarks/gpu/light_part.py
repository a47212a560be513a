"""First light: the smallest kernel, a step of two layers, every kernel once; a process each.

Whatever one of them does (hang, crash, wrong rows) costs that one alone. Four to ten run at a time,
as processors allow. What one that failed has printed is kept in `light-logs`, beside the results.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu import light
from benchmarks.gpu.part import Case, Context, RunCase
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness import store

DEPENDS = ("pallas_kernels", "jmoe", "benchmarks/kernels", "benchmarks/gpu/light.py")
START_S = 0.0
AT_ONCE = max(4, min(10, (os.cpu_count() or 4) * 5 // 8))
LIMIT_S = 75.0
"""Of a case's process: imports, compiling, two runs."""
DRY_LIMIT_S = 60.0
MOST_LOG_LINES = 1000
CORE = {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP": "1"}
"""Has the driver write down which kernel failed, and where."""


def cases(sizes: Sizes) -> list[Case]:
    """Returns the cases, the smallest first. An estimate is a quarter of a case's time, as four run
    at once.
    """
    names = ["smoke", *(f"step/{form}" for form in light.STEPS)]
    names += [case.name for case in light.op_cases(dry=sizes.dry)]
    return [Case(name, 4.0) for name in names]


@contextmanager
def session(context: Context) -> Iterator[RunCase]:
    """Starts a process for every case that is not stored, in order, and yields what waits for a
    case's.
    """
    limit_s = DRY_LIMIT_S if context.sizes.dry else LIMIT_S
    pool = ThreadPoolExecutor(AT_ONCE)
    wanted = [case.name for case in cases(context.sizes) if not context.record("light", case.name)]
    logs = context.kept.folder / "light-logs"

    def submit(name: str) -> Future[dict[str, Any]]:
        return pool.submit(run_case, name, context.sizes.dry, limit_s, logs)

    found = {name: submit(name) for name in wanted}

    def run(case: Case) -> dict[str, Any]:
        if case.name not in found:
            found[case.name] = submit(case.name)
        return found[case.name].result()

    try:
        yield run
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_case(name: str, dry: bool, limit_s: float, logs: Path) -> dict[str, Any]:
    """Runs a case in a process; `figures.verdict` of the record is ok, WRONG, CRASH or HANG. What
    one that is not ok has printed goes to a file in `logs`.
    """
    words = [sys.executable, "-m", "benchmarks.gpu.light", name, *(["--dry-run"] if dry else [])]
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name.replace('/', '.')}.log"
    core = log.with_suffix(".core")
    env = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **CORE,
        "CUDA_COREDUMP_FILE": str(core),
    }
    began = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=store.ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, hung = process.communicate(timeout=limit_s)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, hung = process.communicate(timeout=10)[0], True
    lines = [line.rstrip() for line in printed.splitlines()]
    took_s = time.monotonic() - began
    verdict, more = judged(lines, process.returncode, hung, limit_s)
    record: dict[str, Any] = {"figures": {"verdict": verdict, "took_s": took_s}, **more}
    if verdict != "ok":
        record["failed"] = verdict
        text = "\n".join([*lines[-MOST_LOG_LINES:], *where_it_failed(core)])
        log.write_text(text, encoding="utf-8")
    return record


def where_it_failed(core: Path) -> list[str]:
    """Returns what cuda-gdb reads of the driver's core dump: kernel, warps, instructions. Removes
    the dump.
    """
    if not core.exists():
        return []
    words = ["cuda-gdb", "-batch", "-ex", f"target cudacore {core}", "-ex", "info cuda kernels"]
    words += ["-ex", "info cuda warps", "-ex", "x/24i $pc-256"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"cuda-gdb: {error}"]
    finally:
        core.unlink()
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def judged(lines: list[str], status: int, hung: bool, limit_s: float) -> tuple[str, dict[str, Any]]:
    """Returns the verdict on a process by what it printed and how it ended, and what it found."""
    phase = next((line[7:] for line in reversed(lines) if line.startswith("phase: ")), "start")
    result = next((line[8:] for line in lines if line.startswith("result: ")), None)
    if hung:
        return f"HANG in {phase}, killed after {limit_s:.0f} s", {}
    if result is None:
        last = [line for line in lines if not line.startswith("phase: ")][-3:]
        return f"CRASH in {phase}, status {status}: {' | '.join(last)[-300:]}", {}
    found = json.loads(result)
    if found["ok"]:
        return "ok", {"found": found}
    known = ("first", "share", "nan", "tiles", "error", "unwritten", "runs_differ")
    words = [f"{key} {_short(found[key])}" for key in known if found.get(key)]
    return f"WRONG: {', '.join(words)}", {"found": found}


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
