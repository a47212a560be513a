"""Measures one pair, or lists all of them.

    python -m benchmarks.pairs --list
    python -m benchmarks.pairs NAME [--rounds N] [--out benchmarks/results/NAME.json] [--dry-run]
    python -m benchmarks.pairs peers --at NAME=http://HOST:PORT --at NAME=http://HOST:PORT

Settings are played in turn in one run, so that a machine that slows down slows all of them; quote
ratios. The figures are about this machine's CPU. A dry run plays one round of the smallest size to
test the benchmark, and writes nothing.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks.harness import store
from benchmarks.harness.store import markdown, write_figures
from benchmarks.pairs import harness
from benchmarks.pairs.table import PAIRS


def main() -> None:
    """Prints medians and ratios of one pair and writes them, with every round, to `--out`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(PAIRS), nargs="?")
    parser.add_argument("--rounds", type=int, help="times that each setting is played")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--dry-run", action="store_true", help="one round of the smallest size")
    parser.add_argument("--list", action="store_true", help="print the pairs, measure nothing")
    parser.add_argument("--at", action="append", default=[], help="a server that peers plays")
    args = parser.parse_args()
    if args.list:
        for name, pair in PAIRS.items():
            print(f"{name:13} {pair.about}\n{'':13} {' | '.join(pair.settings)}")
        return
    if args.name is None:
        parser.error("name a pair; --list prints them")
    pair, command = PAIRS[args.name], f"python -m benchmarks.pairs {args.name}"
    if args.at:
        if args.name != "peers" or not all("=" in at for at in args.at):
            parser.error(f"--at {' '.join(args.at)}: peers takes it, as NAME=http://HOST:PORT")
        pair = replace(pair, settings=dict(at.split("=", 1) for at in args.at))
        command += "".join(f" --at {at}" for at in args.at)
    rounds = 1 if args.dry_run else pair.rounds if args.rounds is None else args.rounds
    if rounds < 1:
        parser.error(f"--rounds is {rounds}; it must be 1 or more")
    found = uvloop.run(harness.measure(pair, rounds, args.dry_run))
    medians, ratios = harness.medians(found), harness.ratios(pair, found)
    print(f"{pair.about} Medians of {rounds}:\n")
    figures = list(next(iter(medians.values())))
    rows = [[key, *(f"{one[key]:.4g}" for one in medians.values())] for key in figures]
    print("\n".join(markdown(["", *medians], rows)), end="\n\n")
    for names, of in ratios.items():
        for figure, ratio in of.items():
            span = f"{ratio['min']:.3f} to {ratio['max']:.3f}"
            without = ratio.get("rounds_without", 0)
            span += f"; none in {without} of {rounds} rounds" if without else ""
            print(f"{figure}, {names}: {ratio['median']:.3f} ({span})")
    if args.out and not args.dry_run:
        result = {
            **store.origin(f"{command} --rounds {rounds}"),
            "medians": medians,
            "ratios": ratios,
            "rounds": found,
        }
        write_figures(args.out, result)


if __name__ == "__main__":
    main()
