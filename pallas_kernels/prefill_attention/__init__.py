"""Prefill attention over KV pages: a ragged batch of chunks, each with a cached prefix."""

from pallas_kernels.prefill_attention.op import (
    expanded_attention,
    plan,
    plan_expanded,
    prefill_attention,
)

__all__ = ["expanded_attention", "plan", "plan_expanded", "prefill_attention"]
