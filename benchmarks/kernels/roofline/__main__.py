"""Prints what every case of the kernel benchmark should take on an H200, by arithmetic.

`python -m benchmarks.kernels.roofline [--model NAME] [--page FILE]`: a line a case; or
docs/roofline.md. Needs no GPU, and starts nothing on any device.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.kernels.roofline import page


def main(argv: list[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.kernels.roofline", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default="", help="part of a model's name")
    parser.add_argument("--page", type=Path, help="where docs/roofline.md is written")
    args = parser.parse_args(argv)
    if args.page:
        args.page.write_text(page.page(), encoding="utf-8")
    else:
        print("\n".join(page.text(page.predictions(args.model))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
