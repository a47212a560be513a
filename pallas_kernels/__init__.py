"""Kernels of a paged-expert MoE step, one folder an op: public op, XLA reference, Mosaic kernel.

A caller imports the public op only. It runs the Mosaic kernel on Hopper GPUs where sizes and dtypes
allow (`backend.hopper`), batched XLA on other GPUs, and the XLA reference on CPUs. docs/kernels.md
has the designs.
"""
