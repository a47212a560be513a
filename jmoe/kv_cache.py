"""Paged KV cache: keys and values on the device, in pages."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jmoe.config import ModelConfig


class KVPages(NamedTuple):
    """Keys and values of all layers; position p of a sequence is row p % S of its page p // S.

    A head's rows of a page lie together, so that a kernel reads them as one tile. The last page
    is the padding page: what padding rows write goes there.
    """

    k: Float[Array, "L P G S D"]
    v: Float[Array, "L P G S D"]

    @property
    def padding_page(self) -> int:
        """The page that takes padding rows."""
        return self.k.shape[1] - 1

    @property
    def page_size(self) -> int:
        """Positions a page."""
        return self.k.shape[3]


def make_pages(cfg: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> KVPages:
    """Returns the zeroed pages for `num_pages * page_size` positions of every layer, and the
    padding page.
    """
    shape = (cfg.num_layers, num_pages + 1, cfg.num_kv_heads, page_size, cfg.head_dim)
    return KVPages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def page_bytes(cfg: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Returns the bytes of one page, keys and values of all layers."""
    rows = cfg.num_layers * page_size * cfg.num_kv_heads * cfg.head_dim
    return 2 * rows * jnp.dtype(dtype).itemsize
