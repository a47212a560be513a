"""From a layer's QKV product to queries and KV pages: bias, QK norm, RoPE and the page write."""

from pallas_kernels.kv_write.op import Heads, Projection, split_heads, write_kv
from pallas_kernels.kv_write.reference import turn

__all__ = ["Heads", "Projection", "split_heads", "turn", "write_kv"]
