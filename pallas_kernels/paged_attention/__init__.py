"""Decode attention over KV pages: one query row a sequence."""

from pallas_kernels.paged_attention.op import paged_attention, plan

__all__ = ["paged_attention", "plan"]
