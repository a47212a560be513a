"""Figures of the kernels on a GPU: `python -m benchmarks.kernels`; see `__main__`."""
