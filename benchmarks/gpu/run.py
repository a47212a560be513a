"""The command: which parts and cases, one after the other, until done or out of time.

Parts whose figures come from other processes touch no device in this one.
"""

import argparse
import importlib
import math
import os
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import WEIGHTS, Case, Context, Part, RunCase, plant
from benchmarks.gpu.sizes import DRY, SIZE_HELP, Sizes, changed
from benchmarks.harness import store

PARTS = (
    "light",
    "kernels",
    "tests",
    "layers",
    "step",
    "serve",
    "burst",
    "priority",
    "family",
    "mesh",
    "transformers",
    "startup",
    "distill",
)
"""In order of worth: what is right first, then the headline figures."""

ON_DEMAND = ("sweep",)
"""Parts that run only where they are asked for."""

FIRST = (
    ("light", ""),
    ("kernels", "decode/t64"),
    ("kernels", "prefill/t4096"),
    ("tests", "test_models"),
    ("step", "zero/"),
    ("serve", "capacity/sharegpt"),
    ("burst", "calibration/sharegpt"),
    ("burst", "predictive/sharegpt"),
)
"""Parts, and what of a case's name, that come before all else: they fit half an hour of a GPU."""

OWNS_MEMORY = ("step", "family", "mesh", "distill")
"""Parts that hold a model in their own process, and nobody else does: it takes nearly all memory at
once, as a server does. XLA's own choice, three quarters, is too little for `step` on 80 GB."""
MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_CLIENT_MEM_FRACTION": "0.92"}

SHARE_MEMORY = ("kernels", "sweep", "layers")
"""Parts that may have PyTorch beside jax, which would take three quarters of the memory at once. A
part that starts a server must not do so: the server would inherit it, and leave its memory in
pieces."""

LOST = 3
"""Exit status of a part whose device gives nothing but errors any more: a new process goes on."""
SLACK_S = 90.0
"""Beside twice its estimate, what a case may take before its part is killed."""
LOOK_S = 1.0
LOST_WORDS = ("CUDA_ERROR", "INTERNAL: ", "illegal memory access", "unspecified launch failure")


def module(part: str) -> Part:
    """Returns a part by name."""
    found: Any = importlib.import_module(f"benchmarks.gpu.{part}_part")
    return found


def parse(argv: Sequence[str], about: str) -> argparse.Namespace:
    """Returns the command line."""

    def chosen(text: str) -> list[str]:
        for name in text.split(","):
            if name not in (*PARTS, *ON_DEMAND):
                known = ", ".join((*PARTS, *ON_DEMAND))
                raise argparse.ArgumentTypeError(f"{name!r} is none of {known}")
        return text.split(",")

    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", None, about, formatter_class=words)
    add = parser.add_argument
    add("--parts", type=chosen, default=list(PARTS), help="some of them, with commas")
    add("--match", default="", help="part of a case's name")
    add("--limit-s", type=float, default=math.inf, help="be done within it")
    add("--out", type=Path, help="folder; default: benchmarks/<device>")
    add("--commit", help="what is measured, where there is no git to ask")
    add("--again", action="store_true", help="also what is stored already")
    add("--retry", action="store_true", help="also what failed before")
    add("--size", action="append", default=[], help=SIZE_HELP)
    add("--dry-run", action="store_true", help="tiny, on a CPU: tests this program")
    add("--list", action="store_true", help="print cases, run nothing")
    add("--report", action="store_true", help="tables of what is there")
    return parser.parse_args(argv)


def main(argv: Sequence[str], about: str = "") -> int:
    """Runs the command; returns the exit status."""
    args = parse(argv, about)
    try:
        sizes = changed(DRY if args.dry_run else Sizes(), args.size)
    except ValueError as error:
        print(f"--size: {error}", file=sys.stderr)
        return 2
    if args.report:
        from benchmarks.gpu import report

        return report.main(args.out or store.ROOT / "benchmarks" / "h200", sizes)
    if args.list:
        for part in args.parts:
            for case in module(part).cases(sizes):
                print(f"{part:12} {case.name:44} {case.estimate_s:5.0f} s")
        return 0
    device = "dry-run" if args.dry_run else store.nvidia_smi("name")
    if device is None:
        print(
            "benchmarks.gpu needs an NVIDIA GPU, and nvidia-smi names none here. `--dry-run` runs "
            "every part with tiny models on the CPU, to test the program itself; `--report` shows "
            "what is stored.",
            file=sys.stderr,
        )
        return 2
    if args.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiling is what takes the time
    dry = store.ROOT / "out" / "gpu-dry-run"
    args.out = args.out or (dry if args.dry_run else store.device_folder(device))
    ends_at = time.monotonic() + args.limit_s
    if len(args.parts) == 1:
        if args.parts[0] in SHARE_MEMORY:
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return run_part(args, sizes, device, ends_at)
    return run_parts(args, sizes, ends_at)


# -- several parts: a process each, so that each has the GPU's memory to itself --------------------


def run_parts(args: argparse.Namespace, sizes: Sizes, ends_at: float) -> int:
    """Runs every part in a process of its own, what is `FIRST` first; then prints a table of all.

    A part that cannot be imported costs itself alone. A case that hangs or ends its process costs
    itself: a new process goes on with the cases behind it. Results and table are also packed as
    `OUT.tar.gz`.
    """
    first = [(part, match) for part, match in FIRST if part in args.parts and not args.match]
    absent: dict[str, str] = {}
    worst = 0
    try:
        for part, match in [*first, *((part, args.match) for part in args.parts)]:
            try:
                worst = max(worst, _some(args, sizes, ends_at, part, match))
            except ImportError as error:
                worst = 1
                if part not in absent:
                    print(f"{part}: left out, as {error}", flush=True)
                absent[part] = str(error)
    finally:
        print(_pack(args, sizes, absent), flush=True)
    return worst


def _some(args: argparse.Namespace, sizes: Sizes, ends_at: float, part: str, match: str) -> int:
    """Runs cases of a part in processes of its own until none is left that may be tried."""
    args = argparse.Namespace(**{**vars(args), "match": match})
    of, kept = module(part), _store(args, part)
    worst, before = 0, math.inf
    wanted = todo(args, kept, part, sizes)
    while wanted and len(wanted) < before:
        left_s = ends_at - time.monotonic()
        if left_s < of.START_S + min(case.estimate_s for case in wanted):
            print(f"{part}: {len(wanted)} {store.CALL_AGAIN}", flush=True)
            break
        words = [sys.executable, "-m", "benchmarks.gpu", "--parts", part, "--out", str(args.out)]
        words += ["--match", match, "--limit-s", f"{left_s:.1f}"]
        words += [word for pair in args.size for word in ("--size", pair)]
        words += ["--commit", args.commit] if args.commit else []
        words += [f"--{f}" for f in ("retry", "again") if getattr(args, f)]
        words += ["--dry-run"] if sizes.dry else []
        env = {**os.environ, **(MEMORY if part in OWNS_MEMORY and not sizes.dry else {})}
        most_s = partial(_at_most, args, kept, part, wanted)
        status = _child(words, left_s + 15, env, most_s)
        worst = max(worst, int(status != 0))
        _say_how_it_ended(kept, part, wanted, status)
        # What hung, crashed or lost the device is stored as failed: a new process goes on.
        if status in (0, 1) or args.retry or args.again:
            break
        before, wanted = len(wanted), todo(args, kept, part, sizes)
    return worst


def _under_way(kept: store.Store, part: str, wanted: list[Case]) -> Case | None:
    """Returns the case that was started and has not ended."""
    records = kept.records(part)
    for case in wanted:
        started = records.get(case.name, {}).get("failed") == store.STARTED
        if started and kept.has(part, case.name, failed=True):
            return case
    return None


def _say_how_it_ended(kept: store.Store, part: str, wanted: list[Case], status: int) -> None:
    """Stores why the case that ran as its part's process ended has no result."""
    while case := _under_way(kept, part, wanted):
        if status == LOST:
            how = f"HANG: nothing for {SLACK_S + 2 * case.estimate_s:.0f} s, and it was killed"
        elif status < 0:
            how = f"CRASH: its process was ended by {signal.Signals(-status).name}"
        elif status == 1:
            how = "OUT OF TIME: it was killed"
        else:
            how = f"CRASH: its process ended with status {status}"
        kept.put(part, {**kept.records(part)[case.name], "failed": how})


def _at_most(
    args: argparse.Namespace, kept: store.Store, part: str, wanted: list[Case]
) -> tuple[str, float]:
    """Returns the case that runs now, or "start", and the seconds that it may take at most."""
    start_s, case = module(part).START_S, _under_way(kept, part, wanted)
    if case is None:
        return "start", SLACK_S + 2 * start_s
    # One that is tried again may have been left so by the process before.
    again_s = start_s if args.retry or args.again else 0.0
    return case.name, SLACK_S + 2 * case.estimate_s + again_s


def _pack(args: argparse.Namespace, sizes: Sizes, absent: dict[str, str]) -> str:
    """Writes the report of all parts that were asked for, and one archive of all results; returns
    the report.
    """
    from benchmarks.gpu import report

    stored = {part: _store(args, part).records(part) for part in args.parts if part not in absent}
    text = report.text(stored, sizes)
    text += "".join(f"\n- {part}: left out, as {why}" for part, why in absent.items())
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text(text + "\n", encoding="utf-8")
    with tarfile.open(args.out.with_name(f"{args.out.name}.tar.gz"), "w:gz") as packed:
        packed.add(args.out, args.out.name)
    return text


def _child(
    words: list[str],
    limit_s: float,
    env: dict[str, str],
    most_s: Callable[[], tuple[str, float]] = lambda: ("", math.inf),
) -> int:
    """Runs a part's process and returns its exit status.

    That is 1 where it ran out of time, and `LOST` where a case took longer than `most_s` allows.
    """
    # A session of its own, so that a server it started ends with it.
    process = subprocess.Popen(words, cwd=store.ROOT, start_new_session=True, env=env)
    end = since = time.monotonic()
    end += limit_s
    at = ""
    try:
        while True:
            try:
                return process.wait(min(LOOK_S, max(end - time.monotonic(), 0.01)))
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            if now >= end:
                print("out of time: the part is killed", flush=True)
                return 1
            case, limit = most_s()
            if case != at:
                at, since = case, now
            if now - since > limit:
                print(f"{at}: nothing for {limit:.0f} s: the part is killed", flush=True)
                return LOST
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


# -- one part -------------------------------------------------------------------------------------


def depends(part: str) -> list[str]:
    """Returns the folders and files that a part's figures depend on."""
    return ["benchmarks/gpu/sizes.py", f"benchmarks/gpu/{part}_part.py", *module(part).DEPENDS]


def _store(args: argparse.Namespace, part: str) -> store.Store:
    return store.Store(args.out, {"sources": store.sources(depends(part)), "sizes": args.size})


def todo(args: argparse.Namespace, kept: store.Store, part: str, sizes: Sizes) -> list[Case]:
    """Returns the cases that were asked for and are not stored for these sources."""
    wanted = [case for case in module(part).cases(sizes) if args.match in case.name]
    if args.again:
        return wanted
    records = kept.records(part)
    return [
        case
        for case in wanted
        if not kept.has(part, case.name, failed=not args.retry)
        or records[case.name].get("unfinished")
    ]


def run_part(args: argparse.Namespace, sizes: Sizes, device: str, ends_at: float) -> int:
    """Runs one part's cases that are not stored yet, in this process; returns its exit status."""
    (part,) = args.parts
    kept = _store(args, part)
    wanted = todo(args, kept, part, sizes)
    print(f"== {part}: {len(wanted)} cases to do, to {args.out}", flush=True)
    if not wanted:
        return 0
    about: dict[str, Any] = {
        **kept.revision,
        "commit": store.commit(args.commit),
        "machine": store.machine(device),
        "weights": WEIGHTS,
        "skew": sizes.skew,
    }
    scratch = store.ROOT / "out" / ("gpu-dry-scratch" if sizes.dry else "gpu-scratch")
    scratch.mkdir(parents=True, exist_ok=True)
    cache = store.ROOT / "out" / "gpu-xla-cache"
    context = Context(sizes, kept, scratch, cache, changes=args.size, wanted=wanted)
    failed = 0
    try:
        with module(part).session(context) as run_case:
            for done, case in enumerate(wanted):
                if time.monotonic() + case.estimate_s > ends_at:
                    print(f"{part}: {len(wanted) - done} {store.CALL_AGAIN}", flush=True)
                    break
                why = _run_case(part, case, run_case, context, about)
                failed += bool(why)
                lost = any(word in why for word in LOST_WORDS)
                if lost and part in (*OWNS_MEMORY, *SHARE_MEMORY):
                    print(f"{part}: the device is lost to this process", flush=True)
                    return LOST
    except Exception:  # the session did not begin: nothing is stored, and the next call tries again
        traceback.print_exc()
        return 1
    return int(failed > 0)


def _run_case(
    part: str, case: Case, run_case: RunCase, context: Context, about: dict[str, Any]
) -> str:
    """Runs and stores a case; returns why it failed, or nothing."""
    case_of = {"name": case.name, **case.about}
    record = {"case": case_of, **about, "date": store.now(), **context.facts}

    def run() -> dict[str, Any]:
        if part != "light":  # whose cases plant their own
            plant(f"{part}/{case.name}")
        return run_case(case)

    record = store.attempt(context.kept, part, record, run)
    print(f"{part} {case.name}: {record['wall_s']:.1f} s, {_line(record)}", flush=True)
    return str(record.get("failed", ""))


def _line(record: dict[str, Any]) -> str:
    """Returns a line about the record: why it failed, or its figures."""
    if "failed" in record:
        return f"FAILED: {record['failed']}"
    numbers = [
        f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}"
        for k, v in record.get("figures", {}).items()
        if isinstance(v, int | float | str)
    ]
    return ", ".join(numbers)
