"""Checks and measures jmoe on this GPU, part by part, each figure a record in a JSON file.

`python -m benchmarks.gpu`: all parts, in order of worth, to `benchmarks/<device>/<part>.json`. What
is stored there for the same sources is not measured again, so `--limit-s 540` and further calls do
it piece by piece. `--parts tests,layers` chooses parts, `--match` cases; `--list` shows them.
`--retry` takes up again what failed. `--report` prints tables of what is stored, and needs no GPU.
`--dry-run` needs none either: every part with tiny models on the CPU, which tests this program and
measures nothing. Exit status: 0; 1 if something failed or was wrong; 2 without a GPU.
"""

import sys

from benchmarks.gpu.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__ or ""))
