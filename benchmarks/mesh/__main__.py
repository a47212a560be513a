"""Simulates expert parallelism on many devices, and reckons what it costs; prints tables.

    python -m benchmarks.mesh aep       asynchronous beside synchronous; a quarter of an hour
    python -m benchmarks.mesh forecast  forecasts of asynchrony, held to what `aep` stored
    python -m benchmarks.mesh balance   ways to balance one step; on CPUs: JAX_PLATFORMS=cpu
    python -m benchmarks.mesh drift     the server's mover before a load that drifts; the same
    python -m benchmarks.mesh libra     Libra's published times, and larger meshes
    python -m benchmarks.mesh gain      when copies while a step runs pay

`aep` and `forecast` want numba (the extra `aep`); without it loops are plain Python, for tests
alone. All but the milliseconds of `balance` and `drift` follows from seeds.
"""

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import store
from benchmarks.harness.store import write_figures

STUDIES = ("aep", "forecast", "balance", "drift", "libra", "gain")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Plays the parts that are asked for, keeps the others of the file as they are, with where each
    is from, and prints tables.
    """
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.mesh", description=__doc__, formatter_class=words)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--parts", default="", help="some of the study's, separated by commas")
    parser.add_argument("--json", type=Path, help="file of all figures, read and written")
    parser.add_argument("--tables", action="store_true", help="only print those of --json again")
    parser.add_argument("--dry-run", action="store_true", help="something tiny; writes no file")
    args = parser.parse_args(arguments)
    study = import_module(f"benchmarks.mesh.{args.study}")
    every = getattr(study, "DRY", study.PARTS) if args.dry_run else study.PARTS
    names = args.parts.split(",") if args.parts else every
    if unknown := set(names) - set(study.PARTS):
        parser.error(f"{unknown.pop()!r} is none of {', '.join(study.PARTS)}")
    found: dict[str, Any] = {}
    if args.json and args.json.exists() and not args.dry_run:
        found = json.loads(args.json.read_text(encoding="utf-8"))
    if not args.tables or args.dry_run:
        command = f"python -m benchmarks.mesh {args.study}"
        command += f" --parts {args.parts}" if args.parts else ""
        new = {name: study.PARTS[name](args.dry_run) for name in names}
        store.put_parts(found, new, command)
        if args.json and not args.dry_run:
            write_figures(args.json, found)
    print("\n".join(study.table(found)))
    return found


if __name__ == "__main__":
    main()
