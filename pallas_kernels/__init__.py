"""Kernels of a paged-expert MoE step, one folder an op: the public op and its XLA reference.

A caller imports the public op only. Today every op runs its XLA reference; a Mosaic GPU kernel
takes its place behind the same function.
"""
