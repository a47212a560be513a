"""Prefill attention over KV pages: a ragged batch of chunks, each with a cached prefix."""

from pallas_kernels.prefill_attention.op import plan, prefill_attention

__all__ = ["plan", "prefill_attention"]
