"""Checks every kernel at full size on this GPU, then times it beside libraries.

`python -m benchmarks.kernels`: every case, to `benchmarks/<device>/`; what is stored there for the
same commit is not measured again, so `--limit-s 540` and a second call do it in parts.
`--only grouped_gemm,routing`, `--model`, `--phase` and `--match` choose among cases; `--list` shows
them. `--sweep` searches tiles instead. `--dry-run` needs no GPU: all cases at tiny sizes through
the XLA references, which tests this program and nothing else. Exit status: 0; 1 if a kernel failed
or was wrong; 2 without a GPU.
"""

import os
import sys

if __name__ == "__main__":
    # JAX would take three quarters of the memory for itself, and PyTorch wants some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from benchmarks.kernels.run import main

    sys.exit(main(sys.argv[1:], __doc__ or ""))
