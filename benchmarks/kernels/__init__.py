"""Figures of the kernels on a GPU: the parts `kernels` and `sweep` of `benchmarks.gpu`."""
