"""When does asynchronous expert parallelism pay? All parts take some minutes on one core.

    python -m benchmarks.aep_simulator --json benchmarks/results/aep_simulated.json
    python -m benchmarks.aep_simulator --parts paper,host
    python -m benchmarks.aep_simulator --case mixtral-8x7b,2,8,8192,0.5,different --times FILE

It wants numba (the extra `aep`); without it the loops are plain Python, for tests alone.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.aep_simulator import questions, tables
from benchmarks.aep_simulator.study import SPARE, WAITS_S, WAVES, Case, compare
from benchmarks.harness import store
from benchmarks.harness.command import add_choices, write_figures
from jmoe.parallel.asynchronous import COLLECTIVE_S, NETWORK_COLLECTIVE_S

PARTS = {
    "eight": questions.eight_devices,
    "more": questions.more_devices,
    "host": questions.host_cost,
    "paper": questions.paper,
    "waves": questions.waves,
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Simulates the parts that are asked for, keeps the others of the file, and prints tables."""
    parser = argparse.ArgumentParser(
        "benchmarks.aep_simulator", description=__doc__.splitlines()[0]
    )
    add_choices(parser, "--parts", list(PARTS))
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--tables", action="store_true", help="only print those of --json again")
    parser.add_argument(
        "--case",
        help="one alone: MODEL,K,DEVICES,IN_FLIGHT,SKEW,same|different; changes no file",
    )
    parser.add_argument("--times", default="", help="measured stage times for --case, JSON")
    parser.add_argument("--dry-run", action="store_true", help="one small case")
    args = parser.parse_args(arguments)
    if args.dry_run:
        return one_case("mixtral-8x7b,2,4,16,0.5,different", "")
    if args.case:
        try:
            return one_case(args.case, args.times)
        except ValueError as error:
            parser.error(str(error))
    found: dict[str, Any] = {}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    if not args.tables:
        for name in args.parts:
            start = time.perf_counter()
            found[name] = PARTS[name](lambda line: print(line, flush=True))
            found.setdefault("took_s", {})[name] = time.perf_counter() - start
        found["commit"], found["date"] = store.commit(), store.now()
        found["machine"] = store.machine("cpu")
        found["assumed"] = {
            "spare_slots": SPARE,
            "exchange_s": {"one node": COLLECTIVE_S, "more": NETWORK_COLLECTIVE_S},
            "waits_s": WAITS_S,
            "attention_parts": WAVES,
        }
        if args.json:
            write_figures(args.json, found)
    print("\n".join(tables.all_of(found)))
    return found


def one_case(text: str, times_file: str) -> dict[str, Any]:
    """Returns every system on one case. Raises ValueError for one that is not written as it should
    be.
    """
    model, *numbers, skew, order = text.split(",")
    if len(numbers) != 3 or order not in ("same", "different"):
        raise ValueError(f"--case is {text}; it must be like mixtral-8x7b,2,8,8192,0.5,different")
    top_k, devices, in_flight = map(int, numbers)
    case = Case(
        model, top_k, devices, in_flight, float(skew), order == "same", times_file=times_file
    )
    found = compare(case)
    print("\n".join(tables.by_case([found])))
    return found


if __name__ == "__main__":
    main()
